"""Updating one parameter after another, with moments in the host's memory, gives the same numbers as updating all at once."""

import jax
import numpy as np
import pytest

from train.run.train import train
from train.setup import prepare

MESH = (
    "rules.axes={batch: [fsdp]}",
    "rules.signals={layers/*: {params: {'*/kernel': [fsdp, null]}}}",
    "rules.default=replicate",
    "mesh={fsdp: 8}",
)


def stepped(run, steps=2):
    """The state and the losses after some steps on random tokens."""
    setup = prepare(run)
    state, step, losses = setup.init(), setup.compile_train_step(), []
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
    for number in range(1, steps + 1):
        state, metrics = step(state, jax.device_put(batch, setup.batch_shardings), setup.settings(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_moments_in_the_hosts_memory_change_no_bit(tiny, name):
    overrides = (*MESH, f"optimizer.name={name}")
    (plain, losses), (offloaded, again) = stepped(tiny(*overrides)), stepped(tiny(*overrides, "optimizer.offload=host"))
    assert losses == again
    assert_same(plain, offloaded)
    kinds = {(x.ndim > 0, x.sharding.memory_kind) for x in jax.tree.leaves(offloaded.opt_state)}
    assert kinds == {(True, "pinned_host"), (False, "device")}


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fsdp_tensor", "pipeline", "zero1"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_layout_comes_to_the_losses_of_one_device(tiny, rules_dir, rules, name):
    meshes = {"fsdp_tensor": "{data: 2, fsdp: 2, tensor: 2}", "pipeline": "{data: 2, fsdp: 1, stage: 2, tensor: 2}", "zero1": "{data: 8}"}
    pipeline = ["pipeline={signal: layers, microbatches: 4, schedule: 1f1b}"] if rules == "pipeline" else []
    overrides = (f"rules={rules_dir / rules}.yaml", f"mesh={meshes[rules]}", *pipeline)
    _, alone = stepped(tiny(f"optimizer.name={name}"), 4)
    _, sharded = stepped(tiny(f"optimizer.name={name}", "optimizer.offload=host", *overrides), 4)
    # Sums in another order; Newton-Schulz steps multiply a difference by up to 3.4 each where a singular value is small.
    np.testing.assert_allclose(sharded, alone, rtol=1e-5 if name == "adamw" else 1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_offloaded_moments_goes_on(tiny, tmp_path, stopped_at, read_rows):
    overrides = ("optimizer.offload=host", "optimizer.moments=bf16", "train.steps=4", "checkpoint.every=2")
    with stopped_at(3):
        train(tiny(*overrides))
    train(tiny(*overrides))
    train(tiny(*overrides, f"run.dir={tmp_path / 'whole'}"))
    interrupted, whole = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [row["loss"] for row in interrupted] == [row["loss"] for row in whole]
