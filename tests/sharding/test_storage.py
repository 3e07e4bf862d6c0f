"""Parameters that are stored on the stages that run them: the same numbers, the model's order, and no traffic between stages."""

import re

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
from jgt.planner.hlo.text import Module

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


@pytest.mark.slow
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


# -- split like the optimizer state, and padded ------------------------------------------------------------------------

ZERO1 = {"inputs": ["data"], "optimizer": {"**": ["data", ...]}, "default": "replicate"}
SPLIT = {"inputs": ["data"], "params": {"table": [["tensor", "fsdp"], None], "w": ["fsdp", "tensor"]}, "default": "replicate"}


def odd_params():
    """A table [13, 6], a matrix [6, 10] and a vector [5]."""
    draw = np.random.default_rng(0).normal
    return {name: draw(0, 0.5, shape).astype(np.float32) for name, shape in {"table": (13, 6), "w": (6, 10), "scale": (5,)}.items()}


def odd_loss(params, tokens, dtype=jnp.float32):
    """Casts the table twice and the matrix once."""
    w = params["w"].astype(dtype)
    scores = jnp.tanh(params["table"].astype(dtype)[tokens] @ w) @ w.T @ params["table"].T.astype(dtype)
    return jnp.mean(jax.nn.logsumexp(scores.astype(jnp.float32), -1)) + jnp.sum(params["scale"] ** 2)


def odd_case(rules, sizes, dtype=jnp.float32):
    """A sharded loss, its storage, the parameters as they are stored, and the inputs."""
    params, tokens = odd_params(), np.arange(7 * 6 * sizes.get("data", 1), dtype=np.int32).reshape(-1, 7) % 13
    loss = jgt.shard(lambda params, tokens: odd_loss(params, tokens, dtype), jgt.make_rules(rules), mesh_of(**sizes), pad=True)
    storage = loss.storage(params, tokens)
    return loss, storage, jax.jit(storage.entered, out_shardings=storage.placement.params)(params), tokens


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [(ZERO1, {"data": 2}), (ZERO1, {"data": 7}), (SPLIT, {"tensor": 4, "fsdp": 2}), (SPLIT, {"data": 2, "tensor": 3})],
    ids=["halves", "sevenths", "two-axes", "thirds"],
)
def test_any_size_is_stored_on_any_mesh(rules, sizes):
    loss, storage, there, tokens = odd_case(rules, sizes)
    step = jax.jit(jax.value_and_grad(loss.on_stored(storage)), out_shardings=(None, storage.placement.gradients))
    value, gradients = step(there, tokens)
    expected = jax.value_and_grad(odd_loss)(odd_params(), tokens)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    model = jax.device_get(compiled(lambda tree: storage.left(tree, as_state=True))(gradients))
    assert_close(model, expected[1], 1e-5)
    # The gradient of padding is zero, so it adds nothing to a norm and an optimizer leaves the padding at zero.
    norms = [sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(tree)) for tree in (gradients, expected[1])]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    back = jax.jit(storage.left, out_shardings=storage.saved.params)(there)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), odd_params())


def test_padding_reaches_the_next_multiple_and_a_state_takes_a_dim_that_divides():
    _, storage, there, _ = odd_case(ZERO1, {"data": 2})
    # 13 x 6 in halves of the second dim, 5 as 6.
    assert {name: x.sharding.shard_shape(x.shape) for name, x in there.items()} == {"table": (13, 3), "w": (3, 10), "scale": (3,)}
    assert [form.model.path for form in storage.padded] == ["scale"]
    _, _, there, _ = odd_case(SPLIT, {"tensor": 4, "fsdp": 2})
    assert {name: x.shape for name, x in there.items()} == {"table": (16, 6), "w": (6, 12), "scale": (5,)}


def test_a_state_of_the_model_s_shapes_is_split_evenly():
    _, storage, _, _ = odd_case(SPLIT, {"tensor": 4, "fsdp": 2})
    assert storage.model.params["table"].spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert storage.model.params["w"].spec == jax.sharding.PartitionSpec("fsdp", None)


def test_without_padding_the_axes_must_divide():
    with pytest.raises(jgt.InputError, match="table: dim 0 of the parameter table \\[13, 6\\] has size 13, which tensor=4 x fsdp=2"):
        jgt.shard(odd_loss, jgt.make_rules(SPLIT), mesh_of(tensor=4, fsdp=2)).placement(odd_params(), np.zeros((2, 7), np.int32))


def test_what_is_read_in_bf16_travels_in_bf16():
    loss, storage, there, tokens = odd_case(ZERO1, {"data": 2}, jnp.bfloat16)
    # The gradients of a table that is cast twice are added up in f32, so the function gets it in f32, with the values of bf16.
    low = odd_params() | {
        "table": odd_params()["table"].astype(jnp.bfloat16).astype(np.float32),
        "w": odd_params()["w"].astype(jnp.bfloat16),
    }
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(jax.jit(storage.used)(there)), low)
    assert {name: x.dtype for name, x in jax.eval_shape(storage.used, there).items()} == {name: x.dtype for name, x in low.items()}
    text = compiled(storage.used).lower(there).as_text()
    assert re.search(r"sharding_constraint.*13x6xbf16", text)
    assert not re.search(r"sharding_constraint.*6x10xf32", text)
    value, gradients = compiled(jax.value_and_grad(loss.on_stored(storage)))(there, tokens)
    expected = compiled(jax.value_and_grad(loss))(odd_params(), tokens)
    np.testing.assert_array_equal(value, expected[0])
    assert_close(jax.device_get(compiled(lambda tree: storage.left(tree, as_state=True))(gradients)), expected[1], 1e-2)
