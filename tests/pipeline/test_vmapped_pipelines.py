"""A pipelined function under a vmap over axes that split its batch: each entry is a batch of its own, on its own devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import axes_of, collectives
from models import RULES, assert_close, decoder_loss, make_batch, make_params, mesh_of, pipeline_of

import jgt
from jgt.planner.hlo.text import Module

SIZES = {"data": 2, "fsdp": 2, "stage": 2}


def pipelined(**options):
    return jgt.shard(decoder_loss, jgt.make_rules(RULES), mesh_of(**SIZES), pipeline=pipeline_of(**options))


def batches():
    """[2, ...]: two batches."""
    return jax.tree.map(lambda x: np.stack([x, np.roll(x, 1, axis=-1)]), make_batch())


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        pytest.param("1f1b", True, id="one model"),
        pytest.param("1f1b", False, id="two models", marks=pytest.mark.slow),
        pytest.param("interleaved", False, id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_each_batch_and_nothing_crosses_the_axis(schedule, shares):
    params = make_params(4)
    params = params if shares else jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    dims = (None if shares else 0, 0)
    mapped = jax.jit(jax.vmap(jax.value_and_grad(pipelined(schedule=schedule)), dims, spmd_axis_name="data"))
    compiled = mapped.lower(params, batches()).compile()
    module = Module.parse(compiled.as_text())
    assert not any("data" in axes_of(c, SIZES) for loops in (True, False) for c in collectives(module, in_loops=loops))
    expected = jax.vmap(jax.value_and_grad(decoder_loss), dims)(params, batches())
    assert_close(compiled(params, batches()), expected, 1e-5)


def test_vmaps_that_it_cannot_be_under():
    def ask(axis, entries):
        inputs = jax.tree.map(lambda x: np.concatenate([x] * entries), batches())
        jax.eval_shape(jax.vmap(pipelined(), (None, 0), spmd_axis_name=axis), make_params(4), inputs)

    ask("data", 1)
    with pytest.raises(ValueError, match="spmd_axis_name data around a pipelined function has 4 entries, and the mesh 2 devices along it"):
        ask("data", 2)
    with pytest.raises(ValueError, match="inside a vmap over the mesh axis stage, which does not split its batch"):
        ask("stage", 1)


def test_a_shard_map_around_is_refused():
    specs = (jax.P(), jax.P("data"))
    around = jax.shard_map(pipelined(), mesh=mesh_of(**SIZES), in_specs=specs, out_specs=jax.P(), axis_names={"data"}, check_vma=False)
    with pytest.raises(ValueError, match="a pipelined function cannot be called inside shard_map"):
        jax.eval_shape(around, make_params(4), make_batch())
