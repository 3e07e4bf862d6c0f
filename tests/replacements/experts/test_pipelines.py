"""Experts in the stages of pipelines: exact, and each device keeps its own experts."""

import jax
import jax.numpy as jnp
import pytest
from expert_mixture import every_expert, make, mixed, rules_of, worst

import jgt
from jgt import signal

LAYERS, COUNT, EMBED, FFN = 4, 8, 16, 24
CASES = [
    ({"data": 2, "expert": 2, "stage": 2}, "1f1b", {}),
    ({"data": 2, "expert": 2, "stage": 2}, "zb_interleaved", {"virtual": 2}),
    ({"expert": 4, "stage": 2}, "1f1b", {}),
    ({"expert": 4, "stage": 2}, "interleaved", {"virtual": 2}),
    ({"fsdp": 2, "expert": 2, "stage": 2}, "1f1b", {"gather": "layer"}),
    ({"fsdp": 2, "expert": 2, "stage": 2}, "gpipe", {}),
    ({"expert": 2, "stage": 2, "tensor": 2}, "1f1b", {}),
    ({"expert": 2, "stage": 2, "tensor": 2}, "zb_interleaved", {"virtual": 2}),
]


def loss_of(layer, bias, *, recompute):
    def loss(params, x):
        def run(x, params):
            with signal.context("mix"):
                x = x + 0.5 * x @ params["mix"]
            return x + layer(params, x, 2, bias), None

        with signal.context("layers"):
            y, _ = jax.lax.scan(jax.checkpoint(run, prevent_cse=False) if recompute else run, x, params)
        return jnp.mean(jnp.square(y))

    return loss


@pytest.mark.parametrize(
    ("mesh", "schedule", "options", "is_skewed", "recompute"),
    [
        pytest.param(*case, is_skewed, recompute, marks=() if number == 0 and is_skewed and not recompute else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for is_skewed in (False, True)
        for recompute in (False, True)
    ],
)
def test_a_pipeline_has_the_gradients_of_every_expert_on_every_row(mesh, schedule, options, is_skewed, recompute):
    params = make(jax.random.key(0), COUNT, EMBED, FFN, LAYERS)
    params["mix"] = 0.2 * jax.random.normal(jax.random.key(2), (LAYERS, EMBED, EMBED))
    x = jax.random.normal(jax.random.key(1), (16, 4, EMBED))
    bias = 0.2 * jnp.arange(COUNT) if is_skewed else 0.0
    wanted = jax.jit(jax.value_and_grad(loss_of(every_expert, bias, recompute=recompute)))(params, x)
    pipeline = jgt.Pipeline(signal="layers", schedule=schedule, microbatches=2, **options)
    rules = jgt.make_rules(rules_of(mesh))
    sharded = jgt.shard(loss_of(mixed, bias, recompute=recompute), rules, jgt.make_mesh(mesh), pipeline=pipeline)
    step = jax.jit(jax.value_and_grad(sharded))
    assert worst(step(params, x), wanted) < 5e-6
    text = step.lower(params, x).compile().as_text()
    assert "all-to-all(" in text


@pytest.mark.slow
def test_weights_that_something_else_reads_are_brought_together():
    params = make(jax.random.key(0), COUNT, EMBED, FFN, LAYERS)
    mesh, x = {"data": 2, "expert": 2, "stage": 2}, jax.random.normal(jax.random.key(1), (16, 4, EMBED))

    def loss(layer):
        def run(x, params):
            return x + layer(params, x, 2, 0.0) + 1e-3 * jnp.sum(jnp.square(params["up"])), None

        def of(params, x):
            with signal.context("layers"):
                return jnp.mean(jnp.square(jax.lax.scan(run, x, params)[0]))

        return of

    wanted = jax.jit(jax.value_and_grad(loss(every_expert)))(params, x)
    sharded = jgt.shard(loss(mixed), rules_of(mesh), jgt.make_mesh(mesh), pipeline=jgt.Pipeline(signal="layers", microbatches=2))
    assert worst(jax.jit(jax.value_and_grad(sharded))(params, x), wanted) < 5e-6
