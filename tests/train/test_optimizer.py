"""Schedules by their values, and AdamW against the paper's formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.build import build
from train.models.config import ModelConfig
from train.optimizer import build_optimizer, build_schedule, decayed
from train.sections import OptimizerConfig


def rates(num_steps, **keys):
    schedule = build_schedule(OptimizerConfig(**{"lr": 1.0, **keys}), num_steps)
    return [float(schedule(step)) for step in range(num_steps + 1)]


def test_warmup_starts_above_zero_and_ends_at_lr():
    assert rates(6, schedule="constant", warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1])


def test_constant():
    assert rates(3, schedule="constant") == pytest.approx([1, 1, 1, 1])


def test_cosine_falls_to_final_lr_at_the_last_step():
    half = 0.2 + 0.8 * 0.5
    assert rates(6, schedule="cosine", warmup=2, final_lr=0.2)[2:] == pytest.approx([1, 0.2 + 0.8 * (1 + np.sqrt(0.5)) / 2, half, 0.2 + 0.8 * (1 - np.sqrt(0.5)) / 2, 0.2])


def test_wsd_stays_and_falls_linearly():
    assert rates(10, schedule="wsd", warmup=1, decay=0.4, final_lr=0.0) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_warmup_may_be_longer_than_the_run(schedule, num_steps):
    assert rates(num_steps, schedule=schedule, warmup=9)[:num_steps] == pytest.approx([0.1, 0.2][:num_steps])


def test_adamw():
    config = OptimizerConfig(lr=0.1, schedule="constant", b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.array([1.0, -2.0]), "bias": np.array([0.5])}
    gradients = [{"kernel": np.array([3.0, 4.0]), "bias": np.array([12.0])}, {"kernel": np.array([0.1, 0.2]), "bias": np.array([0.3])}]
    ours = jax.tree.map(jnp.float32, params)
    state = optimizer.init(ours)
    m, v = ({k: np.zeros_like(x) for k, x in params.items()} for _ in range(2))
    for t, gradient in enumerate(gradients, 1):
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradient), state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
        for k, g in gradient.items():
            m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g**2
            update = (m[k] / (1 - 0.8**t)) / (np.sqrt(v[k] / (1 - 0.9**t)) + 1e-6)
            params[k] = params[k] - 0.1 * (update + (0.3 * params[k] if k == "kernel" else 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), ours, params)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_matrices_decay_and_nothing_else(kind):
    model = build(ModelConfig(kind=kind, layers=1, embed=8, heads=2, vocab=9, seq=4))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    spared = {path[-1].key for path, decays in jax.tree.leaves_with_path(decayed(shapes)) if not decays}
    decaying = {path[-1].key for path, decays in jax.tree.leaves_with_path(decayed(shapes)) if decays}
    assert decaying == {"kernel", "embedding"} | ({"unembedding"} if kind == "llama" else set())
    assert spared == {"scale"} | ({"bias", "positions"} if kind == "gpt" else set())


def test_a_late_warmup_leaves_less_to_fall_through():
    schedule = build_schedule(OptimizerConfig(lr=1.0, schedule="wsd", warmup=8, decay=0.5, final_lr=0.1), 10)
    assert float(schedule(10)) == pytest.approx(0.1)
