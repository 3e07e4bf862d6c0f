"""A training step, whole and in parts, compared with its definition on a loss that is small enough to write down."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import objective_of, step_of

from train.step.state import State
from train.step.step import make_eval_step

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(5, 3)).astype(np.float32)}
BATCH = {
    "inputs": RNG.normal(size=(8, 4, 5)).astype(np.float32),
    "targets": RNG.normal(size=(8, 4, 3)).astype(np.float32),
    "weights": RNG.choice([0.0, 0.25, 1.0, 3.0], size=(8, 4)).astype(np.float32),
}


def loss(params, batch):
    return jnp.sum(batch["weights"][..., None] * (batch["inputs"] @ params["w"] - batch["targets"]) ** 2)


def mean_loss(params):
    return loss(params, BATCH) / BATCH["weights"].sum()


def step(batch=BATCH, accumulate=1, clip=None):
    """One step of gradient descent with rate 1, which subtracts the gradient from the parameters."""
    optimizer = optax.sgd(1.0)
    train_step = jax.jit(step_of(loss, optimizer, clip, accumulate=accumulate))
    state, metrics = train_step(State(jnp.zeros((), jnp.int32), PARAMS, optimizer.init(PARAMS)), batch)
    return state, metrics, PARAMS["w"] - state.params["w"]


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_loss_and_gradient_are_those_of_the_weighted_mean_also_in_parts(accumulate):
    state, metrics, gradient = step(accumulate=accumulate)
    value, expected = jax.value_and_grad(mean_loss)(PARAMS)
    np.testing.assert_allclose(gradient, expected["w"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], value, rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(expected["w"]), rtol=1e-5)
    assert state.step == 1


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_longer_gradient_is_clipped_and_its_norm_is_told(share):
    expected = jax.grad(mean_loss)(PARAMS)["w"]
    norm = float(jnp.linalg.norm(expected))
    _, metrics, gradient = step(clip=share * norm)
    np.testing.assert_allclose(gradient, expected * min(share, 1), rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_parts_take_every_so_many_th_row():
    seen = []

    def spy(params, batch):
        jax.debug.callback(lambda x: seen.append(x.tolist()), batch["inputs"][:, 0, 0])
        return loss(params, batch)

    optimizer = optax.sgd(1.0)
    batch = BATCH | {"inputs": np.broadcast_to(np.arange(8.0, dtype=np.float32)[:, None, None], (8, 4, 5))}
    train_step = step_of(spy, optimizer, accumulate=4)
    jax.block_until_ready(train_step(State(jnp.zeros((), jnp.int32), PARAMS, optimizer.init(PARAMS)), batch))
    jax.effects_barrier()
    assert sorted(seen) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_batch_of_padding_moves_nothing():
    _, metrics, gradient = step(BATCH | {"weights": np.zeros((8, 4), np.float32)})
    assert metrics["loss"] == 0
    assert not gradient.any()


def test_the_evaluation_step_gives_sums():
    nats, weights = make_eval_step(objective_of(loss))(PARAMS, (), BATCH)["loss"]
    np.testing.assert_allclose(nats / weights, mean_loss(PARAMS), rtol=1e-6)
    assert weights == BATCH["weights"].sum()
