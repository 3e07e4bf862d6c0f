"""Checkpoints of a small state: bit for bit, on any layout, the last ones kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.checkpoint import Checkpoints
from train.config import CheckpointConfig
from train.step import State


def state_on(spec):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), spec)
    kernel = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16)), sharding)
    return State(jnp.asarray(3), {"kernel": kernel}, {"mu": kernel * 2, "count": jnp.asarray(3)})


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), jax.tree.map(lambda x: x.sharding, state)


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    yield opened
    opened.close()


def test_a_state_comes_back_bit_for_bit_in_the_layout_asked_for(checkpoints):
    saved, other = state_on(PartitionSpec("data")), state_on(PartitionSpec(None, "data"))
    checkpoints.save(saved, 3, samples=48)
    checkpoints.wait()
    restored, samples = checkpoints.restore(3, *shapes_of(other))
    assert samples == 48
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    assert restored.params["kernel"].sharding == other.params["kernel"].sharding


def test_the_newest_is_the_last_finished_and_old_ones_go(checkpoints, tmp_path):
    assert checkpoints.latest is None
    for step in (1, 2, 10):
        checkpoints.save(state_on(PartitionSpec()), step, samples=step)
    checkpoints.wait()
    assert checkpoints.latest == 10
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["10", "2"]


def test_a_folder_without_its_mark_is_no_checkpoint(checkpoints, tmp_path):
    checkpoints.save(state_on(PartitionSpec()), 1, samples=1)
    checkpoints.wait()
    (tmp_path / "5").mkdir()
    again = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    assert again.latest == 1
    again.close()
