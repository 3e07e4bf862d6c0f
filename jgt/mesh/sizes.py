"""The sizes of a mesh, checked without JAX: `{data: 2, fsdp: -1, tensor: 2}`.

At most one size is -1: that axis gets the devices that the other sizes leave over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar

from jgt.document import InputError, Node

# No name can be read as a number, or as the `...` of a spec.
_NAME = re.compile(r"[^\W\d][\w.-]{0,63}")


class MeshSizes(dict[str, int]):
    """The size of each axis of a mesh, outermost first."""

    MOST_DEVICES: ClassVar[int] = 1_000_000
    MOST_AXES: ClassVar[int] = 32
    """More axes than devices could use: 2 ** 20 devices have 20 axes of size 2."""

    @classmethod
    def read(cls, node: Node, problems: list[str]) -> MeshSizes:
        """The `mesh:` section as axis names and sizes, outermost first. Appends to `problems`; a wrong size counts as 1."""
        if not isinstance(node.value, dict) or not node.value:
            example = "outermost first, for example {data: 2, fsdp: -1, tensor: 2}"
            problems.append(node.problem(f"a mesh is a mapping of axis names to sizes, {example}"))
            return cls()
        sizes = cls()
        if len(node.value) > cls.MOST_AXES:
            problems.append(node.problem(f"has {len(node.value):,} axes; a mesh has at most {cls.MOST_AXES}"))
            return cls()
        for axis, child in node.value.items():
            size = child.value
            name, colon, size_text = axis.partition(":")
            if child.value is None and colon and _NAME.fullmatch(name) and re.fullmatch(r"-?\d+", size_text):
                # YAML takes `fsdp:3` for a key without a value.
                problems.append(child.problem(f"a blank is missing after the colon. Write {name}: {size_text}"))
            elif not _NAME.fullmatch(axis):
                problems.append(child.problem("cannot name an axis. Use up to 64 letters, digits, _, - and ., beginning with a letter"))
            # bool is a subclass of int: `data: true` is not a size.
            elif not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                allowed = "a whole number of at least 1, or -1 for the remaining devices"
                problems.append(child.problem(f"an axis size is {allowed}, not {child.in_words()}"))
                sizes[axis] = 1
            elif size > cls.MOST_DEVICES:
                problems.append(child.problem(f"{child.in_words()} is too large; a mesh has at most {cls.MOST_DEVICES:,} devices"))
                sizes[axis] = 1
            else:
                sizes[axis] = size
        if problem := sizes._free_problem():
            problems.append(node.problem(problem))
        # Each size may be within its limit and their product beyond it.
        if (product := sizes._known_product()) > cls.MOST_DEVICES:
            problems.append(node.problem(f"the sizes multiply to {product:,}; a mesh has at most {cls.MOST_DEVICES:,} devices"))
        return sizes

    def resolved(self, num_devices: int | None, where: str = "mesh") -> dict[str, int]:
        """Sizes with the -1 filled in. num_devices: None if it is unknown.

        Raises InputError, whose message begins with `where`, unless the product of the sizes is the number of devices.
        """
        problem = self.problem(num_devices)
        if problem:
            raise InputError([f"{where}: {problem}"])
        if num_devices is None:
            return dict(self)
        remaining = num_devices // self._known_product()
        return {axis: remaining if size == -1 else size for axis, size in self.items()}

    def problem(self, num_devices: int | None) -> str | None:
        """Why these sizes do not use the devices exactly; None if they do."""
        for axis, size in self.items():
            if size < 1 and size != -1:
                return f"the axis {axis} has the size {size}. A size is at least 1, or -1 for the remaining devices"
        if problem := self._free_problem():
            return problem
        has_free = -1 in self.values()
        known = self._known_product()
        product = " x ".join(f"{axis}={size}" for axis, size in self.items())
        if num_devices is None:
            return f"{product}: the number of devices is needed to fill in -1" if has_free else None
        if has_free and num_devices % known:
            indivisible = f"the other sizes multiply to {known}, which does not divide the {num_devices} devices"
            return f"{product}: {indivisible}. Make them divide {num_devices}"
        if not has_free and known != num_devices:
            are = "there is 1" if num_devices == 1 else f"there are {num_devices}"
            return f"{product} = {known} devices, but {are}. Make the product {num_devices}, or one size -1"
        return None

    def over_hosts(self, per_host: int) -> tuple[int, ...]:
        """The number of parts of each axis that lie on different hosts, of `per_host` devices each.

        With 8 devices a host, {data: 4, tensor: 4} gives (2, 1): tensor fits, and 2 of data's 4 share a host with it.
        """
        room = per_host
        over: list[int] = []
        for size in reversed(list(self.values())):
            # The common divisor, not the minimum: an axis of 6 on a host with room for 4 has 2 devices inside, and 3 parts
            # over hosts.
            inside = math.gcd(size, room)
            room //= inside
            over.append(size // inside)
        return tuple(reversed(over))

    def group_of(self, axes: Sequence[str], per_host: int) -> tuple[int, ...]:
        """The devices that the first device talks to along some axes, in their order. Devices are numbered host by host."""
        group, stride, host_stride = [0], 1, per_host
        for (axis, size), over in reversed([*zip(self.items(), self.over_hosts(per_host), strict=True)]):
            inside = size // over
            if axis in axes:
                steps = [host_stride * (step // inside) + stride * (step % inside) for step in range(size)]
                group = [device + step for step in steps for device in group]
            stride, host_stride = stride * inside, host_stride * over
        return tuple(group)

    def _free_problem(self) -> str | None:
        free = [axis for axis, size in self.items() if size == -1]
        return f"only one size may be -1; {' and '.join(free)} are" if len(free) > 1 else None

    def _known_product(self) -> int:
        return math.prod(size for size in self.values() if size != -1)
