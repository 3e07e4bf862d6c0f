"""Parameters that are stored on the stages that run them: the same numbers, the model's order, and no traffic between stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import axes_of, collectives, sizes_of
from models import (
    EMBED,
    FFN,
    RULES,
    assert_close,
    assert_values,
    case,
    compiled,
    decoder_loss,
    make_batch,
    make_params,
    mesh_of,
    pipeline_of,
)

import jgt
from jgt.hlo.text import Module

GRID = [
    (12, {"stage": 2, "tensor": 2, "data": 2}, {"schedule": "interleaved", "virtual": 3}),
    (7, {"stage": 2, "fsdp": 2, "tensor": 2}, {"schedule": "interleaved", "virtual": 2, "gather": "layer"}),
]
MORE = [
    (8, {"stage": 4, "data": 2}, {"schedule": "zigzag"}),
    (5, {"stage": 4, "tensor": 2}, {"schedule": "zb", "remat": "stage"}),
    (9, {"stage": 4, "fsdp": 2}, {"schedule": "zb_interleaved"}),
]


def name_of(value):
    return "-".join(f"{name}{x}" for name, x in value.items()) if isinstance(value, dict) else str(value)


def stored(num_layers, sizes, options, params=None):
    """A case with the function on stored parameters, its storage, and the parameters."""
    one = case(decoder_loss, make_params(num_layers) if params is None else params, make_batch())
    sharded = one.pipelined(mesh_of(**sizes), **options)
    return one, sharded, sharded.storage(one.params, *one.inputs)


@pytest.mark.parametrize(
    ("num_layers", "sizes", "options"), [*GRID, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)], ids=name_of
)
def test_stored_parameters_have_the_values_and_gradients_of_the_model_s(num_layers, sizes, options):
    one, sharded, storage = stored(num_layers, sizes, options)
    there = compiled(storage.entered)(one.params)
    values, gradients = compiled(jax.value_and_grad(sharded.on_stored(storage)))(there, *one.inputs)
    assert_values(values, one.expected[0])
    assert_close(jax.device_get(compiled(storage.left)(gradients)), one.expected[1], 1e-5)
    # Nothing flows into padding, so its gradient is zero, and so is its share of the gradient's norm.
    squares = [sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(tree)) for tree in (gradients, one.expected[1])]
    np.testing.assert_allclose(*squares, rtol=1e-4)


@pytest.mark.parametrize(("num_layers", "sizes", "options"), [*GRID, *MORE], ids=name_of)
def test_what_enters_leaves_with_the_same_bits(num_layers, sizes, options):
    one, _, storage = stored(num_layers, sizes, options)
    there = jax.jit(storage.entered, out_shardings=storage.placement.params)(one.params)
    for name in ("up", "down"):
        x, whole = there["layers"][name], one.params["layers"][name]
        assert x.sharding.shard_shape(x.shape)[1] == x.shape[1] // sizes["stage"]
        if options["schedule"] == "interleaved" and num_layers % x.shape[0] == 0:
            np.testing.assert_array_equal(np.asarray(x).reshape(whole.shape), whole)
    back = jax.jit(storage.left, out_shardings=storage.model.params)(there)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), one.params)


def moves(fn, placement, params, *inputs):
    """The kinds of the collectives that bring anything as large as a layer's matrix from stage to stage, once a step."""
    sizes = {"data": 1, "fsdp": 1, "stage": 2, "tensor": 2}
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, placement.params)
    step = jax.jit(jax.value_and_grad(fn), out_shardings=(placement.replicated(), placement.gradients))
    module = Module.parse(step.lower(shapes, *inputs).compile().as_text())
    found = [i for i in collectives(module, in_loops=False) if i.kind != "all-reduce" and "stage" in axes_of(i, sizes)]
    return {i.kind for i in found if max(sizes_of(i)) >= EMBED * FFN // 2}


def test_stored_weights_and_their_gradients_do_not_move():
    one, sharded, storage = stored(12, {"stage": 2, "tensor": 2}, {"schedule": "interleaved", "virtual": 3})
    assert moves(sharded, storage.model, one.params, *one.inputs) == {"all-to-all"}
    there = jax.eval_shape(storage.entered, one.params)
    assert moves(sharded.on_stored(storage), storage.placement, there, *one.inputs) == set()


def test_neighbouring_layers_are_stored_as_the_model_has_them():
    for num_layers, options in [(4, {}), (6, {"schedule": "zb"})]:
        assert stored(num_layers, {"stage": 2}, options)[2] is None


def test_a_stack_that_more_than_the_layers_read_is_stored_as_the_model_has_it():
    def penalized(params, batch):
        return decoder_loss(params, batch) + 1e-3 * jnp.sum(params["layers"]["up"] ** 2)

    sharded = jgt.shard(penalized, jgt.make_rules(RULES), mesh_of(stage=2), pipeline=pipeline_of(schedule="interleaved"))
    assert sharded.storage(make_params(4), make_batch()) is None


def test_a_cast_of_a_stack_is_stored_too():
    def cast(params, batch):
        layers = jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params["layers"])
        return decoder_loss(params | {"layers": layers}, batch)

    sharded = jgt.shard(cast, jgt.make_rules(RULES), mesh_of(stage=2, tensor=2), pipeline=pipeline_of(schedule="interleaved"))
    params, batch = make_params(4), make_batch()
    storage = sharded.storage(params, batch)
    found = compiled(sharded.on_stored(storage))(compiled(storage.entered)(params), batch)
    np.testing.assert_allclose(found, compiled(cast)(params, batch), rtol=1e-5)
