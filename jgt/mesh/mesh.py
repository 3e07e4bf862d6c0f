"""Makes a JAX mesh from axis names and sizes: which device goes where.

The order of the axes is a statement about speed. Sizes go from the outermost axis to the innermost, and inner axes (tensor,
expert) exchange data in every layer, so they belong inside a host, where links are fastest; outer axes (data, stage) exchange
little and may cross hosts. `jax.experimental.mesh_utils` arranges devices well inside one host or slice. Across hosts it wants
the user to factor every axis into a part over hosts and a part inside. `MeshSizes.over_hosts` finds that factorization: it fills a
host from the innermost axis outwards, and what does not fit lies over hosts.

The invariant: if an axis and all axes inside it fit into a host, no line of devices along it touches a second host. An inner
axis that must cross hosts is allowed, with a warning that names it.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jgt.mesh.sizes import MeshSizes


class Device(Protocol):
    """The properties of a `jax.Device`, real or described, that the placement reads."""

    id: int
    process_index: int
    platform: str
    client: object


DeviceGrid: TypeAlias = "npt.NDArray[np.object_]"
"""Devices as an array, a dim for each axis of the mesh."""


def use_virtual_cpu(num_devices: int) -> None:
    """Makes JAX see this many CPU devices and nothing else, for tests and first steps.

    Must be called before anything asks JAX for devices. Raises RuntimeError if JAX has already started.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def make_mesh(
    sizes: Mapping[str, int],
    *,
    devices: Sequence[Device] | None = None,
    axis_names: Sequence[str] | None = None,
    where: str = "mesh",
) -> Mesh:
    """A mesh over all devices, or over `devices`, which may be descriptions of hardware elsewhere. Its axes are Auto.

        mesh = jgt.make_mesh({"data": 2, "tensor": -1})

    sizes: the sizes by axis, outermost first; one may be -1, the remaining devices.
    devices: the devices; None: those of JAX.
    axis_names: the order of the axes in the mesh, if it differs from the order of `sizes`, which decides the placement.
    where: what messages begin with.

    Raises InputError if the product of the sizes is not the number of devices. Warns if an axis other than the outermost ones must cross
    hosts.
    """
    _check_types(sizes)
    chosen = cast("Sequence[Device]", jax.devices() if devices is None else devices)
    resolved = MeshSizes(sizes).resolved(len(chosen), where)
    names = list(resolved)
    order = names if axis_names is None else list(axis_names)
    # Devices are placed in the order of `sizes`. Transposing afterwards changes the order of the axes and leaves every
    # device with its neighbours.
    grid = np.transpose(arrange(resolved, chosen), [names.index(name) for name in order])
    return Mesh(grid, tuple(order), axis_types=(AxisType.Auto,) * len(order))


def abstract_mesh(
    sizes: Mapping[str, int], *, num_devices: int | None = None, axis_names: Sequence[str] | None = None, where: str = "mesh"
) -> AbstractMesh:
    """A mesh without devices, to check rules for hardware that this machine does not have.

        mesh = jgt.abstract_mesh({"data": -1, "tensor": 8}, num_devices=64)

    sizes, axis_names, where: as for `make_mesh`.
    num_devices: the number of devices, which a size of -1 needs.

    Raises InputError like `make_mesh`.
    """
    _check_types(sizes)
    resolved = MeshSizes(sizes).resolved(num_devices, where)
    order = tuple(resolved if axis_names is None else axis_names)
    return AbstractMesh(tuple(resolved[name] for name in order), order, axis_types=(AxisType.Auto,) * len(order))


def _check_types(sizes: object) -> None:
    """Raises TypeError for anything but a mapping of names to whole numbers."""
    if not isinstance(sizes, Mapping):
        raise TypeError(f"sizes must be a mapping of axis names to sizes, such as {{'data': 2, 'tensor': -1}}, not {sizes!r}")
    for axis, size in cast("Mapping[object, object]", sizes).items():
        # numpy's whole numbers count; True is a whole number to Python, but no size.
        if not isinstance(axis, str) or isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{axis!r}: {size!r} is not an axis of a mesh. Write a name and a whole number, such as 'data': 2")


def arrange(sizes: Mapping[str, int], devices: Sequence[Device]) -> DeviceGrid:
    """Devices in the mesh's shape: by topology inside a host, hosts along the outer axes."""
    num_on_host = collections.Counter(map(host_of, devices))
    shape = tuple(sizes.values())
    if len(num_on_host) == 1:
        # On a TPU, whose links form a torus, this lets an axis of the mesh be a part of an axis of the torus.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    per_host, largest = min(num_on_host.values()), max(num_on_host.values())
    if per_host != largest:
        axes = ", ".join(axis for axis, size in sizes.items() if size > 1)
        # Hosts of different sizes have no common shape inside: the devices are laid out host by host.
        # stacklevel: the warning points to the caller of make_mesh.
        warnings.warn(f"mesh: the hosts have from {per_host} to {largest} devices, so the axes {axes} may cross hosts", stacklevel=3)
        return np.array(sorted(devices, key=lambda d: (host_of(d), d.id)), dtype=object).reshape(shape)
    for axis in crossing_axes(sizes, per_host):
        warnings.warn(
            f"mesh: the axis {axis} (size {sizes[axis]}) crosses hosts, because a host has {per_host} devices. Inner axes are "
            f"fastest inside a host: make {axis} smaller, or put it before the axes that fit",
            stacklevel=3,
        )
    over_hosts = MeshSizes(sizes).over_hosts(per_host)
    inside = tuple(size // outer for size, outer in zip(shape, over_hosts, strict=True))
    blocks = [
        mesh_utils.create_device_mesh(inside, [d for d in devices if host_of(d) == host], allow_split_physical_axes=True)
        # Sorted, because every process of a run has to arrive at the same mesh.
        for host in sorted(num_on_host)
    ]
    return _interleave(blocks, inside, over_hosts)


def host_of(device: Device) -> int:
    """The number of the group of devices with fast links among them: a slice if the device has one, otherwise its process.

    Several processes may share a host or a slice. A described device knows its process only.
    """
    # Reading slice_index of a described device raises, even through getattr with a default.
    if device.platform == "cpu" or type(device.client).__name__ == "CompileOnlyPyClient":
        return device.process_index
    return getattr(device, "slice_index", device.process_index)


def crossing_axes(sizes: Mapping[str, int], per_host: int) -> list[str]:
    """The inner axes that cross hosts.

    Outer is the first axis, and also every leading one with just one device of each line on a host; these are meant to cross.
    """
    split = MeshSizes(sizes).over_hosts(per_host)
    # Axes of size 1 neither cross hosts nor separate outer axes from inner ones.
    axes = [(axis, size, over) for (axis, size), over in zip(sizes.items(), split, strict=True) if size > 1]
    num_outer = len(list(itertools.takewhile(lambda entry: entry[1] == entry[2], axes)))
    return [axis for axis, _, over in axes[max(num_outer, 1) :] if over > 1]


def _interleave(blocks: Sequence[DeviceGrid], inside: tuple[int, ...], over: tuple[int, ...]) -> DeviceGrid:
    """One block of shape `inside` for each host, laid out in a grid of shape `over`."""
    rank = len(inside)
    grid = np.array(blocks, dtype=object).reshape(*over, *inside)
    # [over 0, over 1, ..., inside 0, inside 1, ...] → [over 0, inside 0, over 1, inside 1, ...], then each pair is one dim.
    order = [dim for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for dim in pair]
    return grid.transpose(order).reshape([o * i for o, i in zip(over, inside, strict=True)])
