"""The same losses, gradients and first parameters on every mesh: the proof that sharding changes nothing."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from next_checkpoint import asks_policies, next_checkpoint

from train.config import load
from train.data.opening import open_data
from train.setup import prepare
from train.setup.feed import Feed

MESHES = {
    "replicated": "{data: 8}",
    "zero1": "{data: 8}",
    "fsdp": "{fsdp: 8}",
    "any": "{fsdp: 8}",
    "hybrid": "{replica: 2, fsdp: 4}",
    "tensor": "{data: 2, tensor: 4}",
    "sequence": "{data: 2, tensor: 4}",
    "fsdp_tensor": "{data: 2, fsdp: 2, tensor: 2}",
    "fsdp_sequence": "{data: 2, fsdp: 2, tensor: 2}",
    "overlap": "{data: 1, fsdp: 2, tensor: 4}",
    "pipeline": "{data: 2, fsdp: 1, stage: 2, tensor: 2}",
    "pipeline_sequence": "{data: 1, fsdp: 2, stage: 2, tensor: 2}",
    "context": "{data: 2, fsdp: 1, seq: 4, tensor: 1}",
    "experts": "{data: 2, fsdp: 1, expert: 4}",
}
MODELS = {"experts": ("model.experts={count: 8, ffn: 32, shared: 1}",)}
"""What the models of some rules files need."""
RULES = Path(__file__).parents[3] / "configs" / "rules"
LARGER = ("any", "fsdp_sequence", "overlap", "pipeline_sequence", "sequence", "zero1")
"""Variants of rules that always run."""
STEPS = 20
B1 = 0.9


@dataclass(frozen=True)
class Curve:
    """The numbers of a run: parameters and gradients before the first update, and the loss of every step."""

    params: Any
    gradients: Any
    losses: np.ndarray


@pytest.fixture(scope="module")
def measure(tiny_file):
    """A run's curve. Each run is measured only once."""
    known = {}

    def _measure(*overrides, steps=STEPS):
        key = (overrides, steps)
        if key not in known:
            # Without the clip, Adam's first moment after one step is the gradient times 1 - b1.
            known[key] = _curve(load(tiny_file, ["optimizer.clip=null", f"optimizer.b1={B1}", *overrides]), steps)
        return known[key]

    return _measure


def _curve(run, steps):
    setup = prepare(run)
    config = run.config
    data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused"))
    feed = Feed(data, setup)
    state = setup.init()
    params, gradients, losses = jax.device_get(state.params), None, []
    step = setup.compile_train_step()
    for number, batch in enumerate(islice(feed.train(0), steps), 1):
        state, metrics = step(state, batch, setup.settings(number))
        losses.append(float(metrics["loss"]))
        if gradients is None:
            moment = jax.device_get(optax.tree.get(state.opt_state, "mu"))
            gradients = jax.tree.map(lambda m: m / (1 - B1), moment)
    return Curve(params, gradients, np.array(losses))


def sharded(name, mesh=None):
    return f"rules={RULES / name}.yaml", f"mesh={mesh or MESHES[name]}"


def assert_same(curve, reference, tolerance=1e-5):
    jax.tree.map(np.testing.assert_array_equal, curve.params, reference.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), curve.gradients, reference.gradients)
    np.testing.assert_allclose(curve.losses, reference.losses[: len(curve.losses)], rtol=0, atol=tolerance)


def test_every_rules_file_has_a_mesh_here():
    assert {path.stem for path in RULES.glob("*.yaml")} == MESHES.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem in LARGER)) for path in sorted(RULES.glob("*.yaml"))],
)
def test_sharded_runs_have_the_curve_of_one_device(measure, name):
    model = MODELS.get(name, ())
    curve, reference = measure(*sharded(name), *model), measure(*model)
    assert_same(curve, reference)
    assert reference.losses[-1] < reference.losses[0] - 0.5


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        pytest.param(("model.kind=gpt",), "block", marks=pytest.mark.slow),
        pytest.param(("model.kind=gpt",), "matmuls", marks=pytest.mark.slow),
        ((), "matmuls"),
        (("model.tied=true", "model.kv_heads=2"), "[heads, hidden]"),
    ],
    ids=["gpt", "gpt-matmuls", "matmuls", "tied-grouped"],
)
def test_other_models_also_when_layers_are_recomputed(measure, model, remat):
    assert_same(measure(*sharded("fsdp_tensor"), *model, f"train.remat={remat}", steps=4), measure(*model, steps=4))


@pytest.mark.parametrize("remat", ["block", pytest.param("matmuls", marks=asks_policies)])
def test_jaxs_next_checkpoint_gives_the_same_numbers(measure, tiny_file, remat):
    overrides = ["optimizer.clip=null", f"optimizer.b1={B1}", *sharded("fsdp_tensor"), f"train.remat={remat}"]
    with next_checkpoint():
        curve = _curve(load(tiny_file, overrides), 4)
    assert_same(curve, measure(steps=4))


def test_bf16_is_near_f32(measure):
    curve = measure(*sharded("fsdp_tensor"), "model.dtype=bf16", steps=4)
    assert_same(curve, measure(), tolerance=2e-2)
    assert not np.allclose(curve.losses, measure().losses[:4], rtol=0, atol=1e-5)


def test_accumulated_parts_have_the_curve_of_the_whole_batch(measure):
    assert_same(measure(*sharded("fsdp_tensor"), "train.accumulate=4", steps=4), measure())
