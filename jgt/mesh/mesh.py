"""Axis names and sizes → a JAX mesh: devices ordered by topology, the inner axes inside one host."""

from __future__ import annotations

import collections
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jgt.mesh.sizes import resolve_sizes


def make_mesh(
    sizes: Mapping[str, int], *, devices: Sequence[Any] | None = None, axis_names: Sequence[str] | None = None, where: str = "mesh"
) -> Mesh:
    """A mesh over all devices (or those given, also of hardware that is only described), Auto axes.

    `sizes` go from the outermost axis to the innermost; one may be -1. Outer axes are laid over hosts, inner ones stay
    inside a host, where links are fast. axis_names: the order of the axes in the mesh, where it is not that of the
    placement. Raises InputError when the product is not the number of devices. Warns, with the axis, when an axis other
    than the outermost ones must cross hosts.
    """
    devices = list(jax.devices() if devices is None else devices)
    resolved = resolve_sizes(sizes, len(devices), where)
    names = list(resolved)
    order = names if axis_names is None else list(axis_names)
    placed = np.transpose(arrange(resolved, devices), [names.index(name) for name in order])
    return Mesh(placed, tuple(order), axis_types=(AxisType.Auto,) * len(order))


def abstract_mesh(
    sizes: Mapping[str, int], *, num_devices: int | None = None, axis_names: Sequence[str] | None = None, where: str = "mesh"
) -> AbstractMesh:
    """A mesh without devices, to check rules for hardware that is not here. A size of -1 needs `num_devices`.

    Raises InputError like `make_mesh`.
    """
    resolved = resolve_sizes(sizes, num_devices, where)
    order = tuple(resolved if axis_names is None else axis_names)
    return AbstractMesh(tuple(resolved[name] for name in order), order, axis_types=(AxisType.Auto,) * len(order))


def arrange(sizes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices as an array of the mesh's shape: by topology inside a host, hosts along the outer axes."""
    num_on = collections.Counter(map(host_of, devices))
    shape = tuple(sizes.values())
    if len(num_on) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    per_host = min(num_on.values())
    if per_host != max(num_on.values()):
        axes = ", ".join(axis for axis, size in sizes.items() if size > 1)
        warnings.warn(f"mesh: the hosts have from {per_host} to {max(num_on.values())} devices, so the axes {axes} may cross hosts", stacklevel=3)
        return np.array(sorted(devices, key=lambda d: (host_of(d), d.id)), dtype=object).reshape(shape)
    for axis in crossing_axes(sizes, per_host):
        warnings.warn(
            f"mesh: the axis {axis} (size {sizes[axis]}) crosses hosts, because a host has {per_host} devices. Inner axes are "
            f"fastest inside a host: make {axis} smaller, or put it before the axes that fit",
            stacklevel=3,
        )
    over_hosts = split_over_hosts(sizes, per_host)
    inside = tuple(size // outer for size, outer in zip(shape, over_hosts, strict=True))
    blocks = [
        mesh_utils.create_device_mesh(inside, [d for d in devices if host_of(d) == host], allow_split_physical_axes=True)
        for host in sorted(num_on)
    ]
    return _interleave(blocks, inside, over_hosts)


def host_of(device: Any) -> int:
    """The host, or the slice of fast links, that a device belongs to: several processes may share one.

    A device that is only described knows its process alone.
    """
    if device.platform == "cpu" or type(device.client).__name__ == "CompileOnlyPyClient":
        return device.process_index
    return getattr(device, "slice_index", device.process_index)


def split_over_hosts(sizes: Mapping[str, int], per_host: int) -> tuple[int, ...]:
    """How many parts of each axis lie on different hosts, filling a host of `per_host` devices from the innermost axis."""
    left, over = per_host, []
    for size in reversed(list(sizes.values())):
        inside = math.gcd(size, left)
        left //= inside
        over.append(size // inside)
    return tuple(reversed(over))


def crossing_axes(sizes: Mapping[str, int], per_host: int) -> list[str]:
    """The axes that cross hosts although they are inner.

    Outer is the first axis, and every leading one that lies wholly over hosts.
    """
    real = [(axis, size, n) for (axis, size), n in zip(sizes.items(), split_over_hosts(sizes, per_host), strict=True) if size > 1]
    num_outer = len(list(itertools.takewhile(lambda entry: entry[1] == entry[2], real)))
    return [axis for axis, _, n in real[max(num_outer, 1) :] if n > 1]


def _interleave(blocks: Sequence[np.ndarray], inside: tuple[int, ...], over: tuple[int, ...]) -> np.ndarray:
    """Blocks of shape `inside`, one a host, laid in a grid of shape `over`."""
    rank = len(inside)
    grid = np.array(blocks, dtype=object).reshape(*over, *inside)
    order = [d for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for d in pair]
    return grid.transpose(order).reshape([o * i for o, i in zip(over, inside, strict=True)])
