"""A search knows without JAX where a mesh puts its devices, and what their links take."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgt.hardware.chip import parse_target
from jgt.mesh.mesh import arrange
from train.search.columns import Columns
from train.search.layout import Candidate, Stages
from train.search.step import group_of, send_time

AXES = ("data", "fsdp", "stage", "tensor")


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.filterwarnings("ignore:mesh:UserWarning")
@given(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 4), st.sets(st.sampled_from(AXES), min_size=1))
def test_a_group_has_the_devices_that_the_mesh_puts_there(sizes, axes):
    mesh, total = dict(zip(AXES, sizes, strict=True)), int(np.prod(sizes))
    per_host = next(size for size in (8, 4, 2, 1) if total % size == 0)
    grid = arrange(mesh, [Device(id=number, process_index=number // per_host) for number in range(total)])
    line = grid[tuple(slice(None) if axis in axes else 0 for axis in AXES)]
    assert list(group_of(mesh, list(axes), per_host)) == [device.id for device in line.flat]


def test_a_ring_over_hosts_uses_one_port_of_a_host():
    seconds = send_time(parse_target("h100:2x8"))
    inside, over = {"data": 2, "tensor": 8}, {"tensor": 16}
    assert seconds(over, ["tensor"], 1e9, is_ring=True) > 4 * seconds(over, ["tensor"], 1e9)
    assert seconds(over, ["tensor"], 1e9, is_ring=True) > 4 * seconds(inside, ["tensor"], 1e9, is_ring=True)


def test_stages_of_different_depths_wait_for_the_deepest():
    def pipeline(stages):
        how = Stages(schedule="1f1b", virtual=None, microbatches=64, remat="none", gather="step")
        return Candidate(mesh=(("stage", stages),), rules="jgt:pipeline", batch_axes=(), accumulate=1, rows=1, remat=None, stages=how)

    # 36 layers in 16 stages: some have 3, and 2.25 are the mean.
    assert Columns([pipeline(12), pipeline(16)], 36).uneven.tolist() == [1.0, 48 / 36]
