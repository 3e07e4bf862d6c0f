"""Mesh sizes, checked without JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from jgt.document import InputError, Node, describe

MAX_DEVICES = 1_000_000
MAX_AXES = 32
_NAME = re.compile(r"[^\W\d][\w.-]{0,63}")


def read_sizes(node: Node, problems: list[str]) -> dict[str, int]:
    """The `mesh:` section: axis names to sizes, in order, at most one of them -1."""
    if not isinstance(node.value, dict) or not node.value:
        problems.append(node.problem("a mesh is a mapping of axis names to sizes, outermost first, for example {data: 2, fsdp: -1, tensor: 2}"))
        return {}
    sizes: dict[str, int] = {}
    if len(node.value) > MAX_AXES:
        problems.append(node.problem(f"has {len(node.value):,} axes; a mesh has at most {MAX_AXES}"))
        return {}
    for axis, child in node.value.items():
        if not _NAME.fullmatch(axis):
            problems.append(child.problem("cannot name an axis. Use up to 64 letters, digits, _, - and ., beginning with a letter"))
        elif type(child.value) is not int or (child.value < 1 and child.value != -1):
            problems.append(child.problem(f"an axis size is a whole number of at least 1, or -1 for what is left, not {describe(child.value)}"))
        elif child.value > MAX_DEVICES:
            problems.append(child.problem(f"{describe(child.value)} is too large; a mesh has at most {MAX_DEVICES:,} devices"))
        else:
            sizes[axis] = child.value
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        problems.append(node.problem(f"only one size may be -1; {' and '.join(free)} are"))
    product = math.prod(size for size in sizes.values() if size != -1)
    if product > MAX_DEVICES:
        problems.append(node.problem(f"the sizes multiply to {product:,}; a mesh has at most {MAX_DEVICES:,} devices"))
    return sizes


def resolve_sizes(sizes: Mapping[str, int], num_devices: int | None, where: str = "mesh") -> dict[str, int]:
    """Sizes with the -1 filled in. Raises InputError unless their product is the number of devices (None: unknown)."""
    problem = size_problem(sizes, num_devices)
    if problem:
        raise InputError([f"{where}: {problem}"])
    if num_devices is None:
        return dict(sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    return {axis: num_devices // known if size == -1 else size for axis, size in sizes.items()}


def size_problem(sizes: Mapping[str, int], num_devices: int | None) -> str | None:
    """What keeps these sizes from covering the devices exactly; None when nothing does."""
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            return f"the axis {axis} has the size {size}. A size is at least 1, or -1 for what is left"
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        return f"only one size may be -1; {' and '.join(free)} are"
    known = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if num_devices is None:
        return f"{shown}: the number of devices is needed to fill in -1" if free else None
    if free and num_devices % known:
        return f"{shown}: the other sizes multiply to {known}, which does not divide the {num_devices} devices. Make them divide {num_devices}"
    if not free and known != num_devices:
        return f"{shown} = {known} devices, but there are {num_devices}. Make the product {num_devices}, or one size -1"
    return None
