"""Devices are laid into a mesh so that inner axes stay inside a host."""

import math
import warnings
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jgt
from jgt.document import InputError
from jgt.mesh.mesh import arrange, crossing_axes
from jgt.mesh.sizes import MeshSizes


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def hosts_of(num_hosts, per_host):
    return [Device(id=n, process_index=n // per_host) for n in range(num_hosts * per_host)]


def num_hosts_along(mesh, dim):
    """The largest number of hosts on a line of devices along an axis of the mesh."""
    lines = np.moveaxis(mesh, dim, -1).reshape(-1, mesh.shape[dim])
    return max(len({d.process_index for d in line}) for line in lines)


def test_a_mesh_has_its_axes_in_order_and_leaves_sharding_to_the_partitioner():
    mesh = jgt.make_mesh({"data": 2, "fsdp": -1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


def test_a_mesh_may_use_some_devices():
    assert [d.id for d in jgt.make_mesh({"data": -1}, devices=jax.devices()[:2]).devices] == [0, 1]


def test_a_mesh_must_use_all_devices_that_it_is_given():
    with pytest.raises(InputError, match=r"^run\.yaml:3: data=2 x tensor=2 = 4 devices, but there are 8"):
        jgt.make_mesh({"data": 2, "tensor": 2}, where="run.yaml:3")


def test_an_abstract_mesh_needs_no_devices():
    mesh = jgt.abstract_mesh({"data": -1, "tensor": 8}, num_devices=4096)
    assert dict(mesh.shape) == {"data": 512, "tensor": 8}
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_an_abstract_mesh_refuses_what_a_mesh_does():
    with pytest.raises(InputError, match="= 4 devices, but there are 8"):
        jgt.abstract_mesh({"data": 4}, num_devices=8)
    with pytest.raises(InputError, match="the number of devices is needed"):
        jgt.abstract_mesh({"data": -1})


@pytest.mark.parametrize(
    ("sizes", "num_hosts", "per_host", "along"),
    [
        ({"data": 2, "tensor": 8}, 2, 8, (2, 1)),
        ({"data": 4, "fsdp": 4, "tensor": 2}, 4, 8, (4, 1, 1)),
        ({"data": 4, "tensor": 4}, 2, 8, (2, 1)),
        ({"fsdp": 16}, 2, 8, (2,)),
        ({"stage": 2, "data": 2, "tensor": 8}, 4, 8, (2, 2, 1)),
        ({"data": 1, "fsdp": 16, "tensor": 1}, 2, 8, (1, 2, 1)),
    ],
)
def test_inner_axes_stay_inside_a_host(sizes, num_hosts, per_host, along):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = arrange(sizes, hosts_of(num_hosts, per_host))
    assert tuple(num_hosts_along(mesh, dim) for dim in range(mesh.ndim)) == along


def test_devices_go_in_order_along_the_mesh():
    mesh = arrange({"data": 2, "fsdp": 2, "tensor": 4}, hosts_of(2, 8))
    np.testing.assert_array_equal(np.vectorize(lambda d: d.id)(mesh), np.arange(16).reshape(2, 2, 4))


def test_the_order_of_the_devices_given_does_not_mix_hosts():
    devices = hosts_of(2, 4)
    mesh = arrange({"data": 2, "tensor": 4}, devices[::2] + devices[1::2])
    assert num_hosts_along(mesh, 1) == 1


@pytest.mark.parametrize(
    ("sizes", "per_host", "crossing"),
    [
        ({"data": 2, "tensor": 16}, 8, ["tensor"]),
        ({"data": 1, "tensor": 16}, 8, []),
        ({"data": 4, "fsdp": 4, "tensor": 2}, 8, []),
        ({"data": 2, "fsdp": 8, "tensor": 2}, 8, ["fsdp"]),
        ({"data": 4, "fsdp": 4, "tensor": 8}, 8, []),
        ({"fsdp": 16}, 8, []),
        ({"data": 2, "tensor": 8}, 8, []),
        ({"a": 2, "b": 3, "c": 4}, 8, ["b"]),
        ({"data": 2, "a": 3, "b": 3}, 2, ["a", "b"]),
        ({"data": 8}, 1, []),
        ({"data": 4, "tensor": 2}, 1, []),
    ],
)
def test_inner_axes_that_cross_hosts(sizes, per_host, crossing):
    assert crossing_axes(sizes, per_host) == crossing


def test_a_crossing_axis_is_warned_about_by_name():
    with pytest.warns(UserWarning, match=r"the axis tensor \(size 16\) crosses hosts, because a host has 8 devices"):
        mesh = arrange({"data": 2, "tensor": 16}, hosts_of(4, 8))
    assert num_hosts_along(mesh, 1) == 2


def test_uneven_hosts_are_warned_about():
    devices = hosts_of(2, 4)[:-2]
    with pytest.warns(UserWarning, match="the hosts have from 2 to 4 devices, so the axes data, tensor may cross hosts"):
        mesh = arrange({"data": 3, "one": 1, "tensor": 2}, devices)
    assert [d.id for d in mesh.flat] == list(range(6))


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_a_mesh_is_a_permutation_of_its_devices(sizes, data):
    total = math.prod(sizes)
    per_host = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    devices = hosts_of(total // per_host, per_host)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = arrange({f"a{n}": size for n, size in enumerate(sizes)}, data.draw(st.permutations(devices)))
    assert mesh.shape == tuple(sizes)
    assert sorted(d.id for d in mesh.flat) == list(range(total))


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_axes_that_fit_into_a_host_never_cross_hosts(sizes, data):
    total = math.prod(sizes)
    per_host = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    named = {f"a{n}": size for n, size in enumerate(sizes)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = arrange(named, hosts_of(total // per_host, per_host))
    inner = [dim for dim in range(len(sizes)) if math.prod(sizes[dim:]) <= per_host and per_host % math.prod(sizes[dim:]) == 0]
    assert all(num_hosts_along(mesh, dim) == 1 for dim in inner)
    assert not {f"a{dim}" for dim in inner} & set(crossing_axes(named, per_host))


AXES = ("data", "fsdp", "stage", "tensor")


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")
@given(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 4), st.sets(st.sampled_from(AXES), min_size=1))
def test_a_group_has_the_devices_that_the_mesh_puts_there(sizes, axes):
    mesh, total = dict(zip(AXES, sizes, strict=True)), math.prod(sizes)
    per_host = next(size for size in (8, 4, 2, 1) if total % size == 0)
    grid = arrange(mesh, hosts_of(total // per_host, per_host))
    line = grid[tuple(slice(None) if axis in axes else 0 for axis in AXES)]
    assert list(MeshSizes(mesh).group_of(list(axes), per_host)) == [device.id for device in line.flat]
