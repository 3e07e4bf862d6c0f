"""Gradients of parameters that are added up group by group or in f32, compared with JAX's own."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from jgt.program import jaxpr as jx
from jgt.program.places import Place
from jgt.program.tracing import evaluate, trace
from jgt.replacements.gradients import SummedGradients, sum_of_groups
from jgt.replacements.replacement import Site

TABLE = jax.random.normal(jax.random.key(0), (8, 3))
TOKENS = jax.random.randint(jax.random.key(1), (4, 5), 0, 8)
COTANGENT = jax.random.normal(jax.random.key(2), (4, 5, 3))
TWO = {"data": 2, "fsdp": 2}
SPLIT = (("fsdp",), ())


def changed(fn, dims, *args, batch=TWO, wide=False):
    """fn(parameter, *args) with the gradient of its parameter added up otherwise, and whether its program has changed."""
    program, tree = trace(fn, *args)
    rules = jgt.make_rules({"inputs": {"**": [list(batch), "..."]}, "default": "replicate"})
    parameter = SimpleNamespace(shape=args[0].shape, dims=dims)
    site = Site(
        mesh=jgt.abstract_mesh({**batch, "tensor": 2}, num_devices=8 if batch == TWO else None),
        free=lambda dims, _: dims,
        parameters=[parameter],
        is_whole=True,
    )
    new = SummedGradients(rules, is_wide=wide).apply(program, Place(), site).program
    is_same = str(new) == str(program)
    return lambda *args: jax.tree.unflatten(tree, evaluate(new, args)), not is_same


def test_lookups_in_a_table_for_each_row_are_left_alone():
    tables, tokens = jax.random.normal(jax.random.key(0), (4, 8, 3)), jax.random.randint(jax.random.key(1), (4, 6), 0, 8)
    fn, is_changed = changed(jax.vmap(lambda table, tokens: table[tokens]), ((), ("fsdp",), ()), tables, tokens)
    assert not is_changed and fn(tables, tokens).shape == (4, 6, 3)


LOOKUPS = {
    "index": lambda table, tokens: table[tokens],
    "take": lambda table, tokens: jnp.take(table, tokens, axis=0),
    "clip": lambda table, tokens: jnp.take(table, tokens, axis=0, mode="clip"),
    "in jit": lambda table, tokens: jax.jit(lambda table: table.astype(jnp.float32))(table)[tokens],
    "checkpoint": lambda table, tokens: jax.checkpoint(lambda table: table[tokens])(table),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", LOOKUPS)
def test_lookup_and_gradient_are_those_of_indexing(kind, wide):
    look_up, is_changed = changed(LOOKUPS[kind], SPLIT, TABLE, TOKENS, wide=wide)
    assert is_changed
    found, pull = jax.vjp(lambda table: look_up(table, TOKENS), TABLE)
    expected, pull_expected = jax.vjp(lambda table: table[TOKENS], TABLE)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(*pull(COTANGENT), *pull_expected(COTANGENT), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dims", "batch", "rows"),
    [
        # Split over all axes of the batch, and over none of them.
        ((("data", "fsdp"), ()), TWO, 4),
        ((("tensor",), ()), TWO, 4),
        (SPLIT, {"fsdp": 2}, 4),
        # As in a call with a single row.
        (SPLIT, TWO, 1),
    ],
)
def test_where_one_sum_is_as_good_the_program_stays(dims, batch, rows):
    assert not changed(LOOKUPS["index"], dims, TABLE, TOKENS[:rows], batch=batch)[1]


def test_a_table_that_is_made_by_the_program_stays():
    assert not changed(lambda x, tokens: (x + 1)[tokens], SPLIT, TABLE, TOKENS)[1]


def test_a_function_with_no_parameter_but_the_table_is_changed_once():
    # The derivative's own program has the same arguments as the function, and must not be changed again.
    rules = jgt.make_rules({"signals": {"embed": {"params": {"*": ["fsdp", None]}}}, "inputs": {"*": [["data", "fsdp"], "..."]}})
    mesh = jgt.abstract_mesh({"data": 2, "fsdp": 2})

    def look_up(params, tokens):
        with jgt.signal.context("embed"):
            return params["table"][tokens]

    program = jax.make_jaxpr(jgt.shard(look_up, rules, mesh))({"table": TABLE}, TOKENS)
    assert str(program).count("custom_vjp_call[") == 1


@pytest.mark.parametrize("batch", [{}, TWO])
def test_a_wide_gradient_of_a_table_is_rounded_once(batch):
    # In bf16, 256 + 1 is 256.
    tokens, cotangent = jnp.zeros((4, 1), jnp.int32), jnp.array([256.0, 1, 1, 1], jnp.bfloat16)[:, None, None]
    table = jnp.zeros((1, 1), jnp.bfloat16)
    look_up, _ = changed(LOOKUPS["index"], SPLIT, table, tokens, batch=batch, wide=True)
    assert jax.vjp(lambda table: look_up(table, tokens), table)[1](cotangent)[0].item() == 260


MATMULS = {
    "linear": ("bsk,kn->bsn", (2, 5, 6), (6, 3)),
    "weights first": ("kn,bsk->nbs", (2, 5, 6), (6, 3)),
    "heads": ("bsk,knh->bsnh", (2, 5, 6), (6, 3, 2)),
    "transposed": ("bsk,nk->bsn", (2, 5, 6), (3, 6)),
    "grouped": ("gsk,gkn->gsn", (2, 5, 6), (2, 6, 3)),
}


@pytest.mark.parametrize("kind", MATMULS)
def test_a_wide_gradient_of_a_matrix_is_summed_in_f32(kind):
    letters, *shapes = MATMULS[kind]
    x, weights = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes))

    def product(weights, x):
        return jnp.einsum(letters, *((weights, x) if letters.startswith("kn,") else (x, weights)))

    wide, is_changed = changed(product, ((),) * weights.ndim, weights, x, wide=True)
    assert is_changed
    found, pull = jax.vjp(wide, weights, x)
    expected, pull_expected = jax.vjp(product, weights, x)
    np.testing.assert_array_equal(found, expected)
    for a, b in zip(pull(found), pull_expected(found), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-2)
    sums = [e for e in jx.body(jax.make_jaxpr(pull)(found)).eqns if e.primitive.name == "dot_general"]
    assert sorted(jx.dtype_of(e.outvars[0]).name for e in sums) == ["bfloat16", "float32"]


def test_matmuls_in_f32_and_of_no_parameter_stay():
    assert not changed(lambda w, x: x @ w, ((), ()), jnp.ones((6, 3)), jnp.ones((2, 6)), wide=True)[1]
    narrow = [jnp.ones(shape, jnp.bfloat16) for shape in ((6, 3), (2, 6))]
    assert not changed(lambda w, x: (x + 1) @ (w * 2), ((), ()), *narrow, wide=True)[1]


def test_a_layer_of_a_scan_has_wide_gradients_and_its_policy_still_sees_the_matmul():
    weights, x = jnp.ones((3, 4, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16)

    def layers(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=jax.checkpoint_policies.dots_saveable)
        return jax.lax.scan(layer, x, weights)[0]

    wide, is_changed = changed(layers, ((), (), ()), weights, x, wide=True)
    assert is_changed
    found, expected = (jax.grad(lambda w, fn=fn: jnp.sum(fn(w, x)).astype(jnp.float32))(weights) for fn in (wide, layers))
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2)
    # No matmul runs twice: one forward, two backward.
    assert str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(wide(w, x)).astype(jnp.float32)))(weights)).count("dot_general") == 3


def test_a_derivative_that_a_model_brings_along_is_wide_too():
    @jax.custom_vjp
    def doubled(scale, w, x):
        return scale * (x @ w)

    doubled.defvjp(lambda scale, w, x: (doubled(scale, w, x), (w, x)), lambda saved, g: (None, 2 * saved[1].T @ g, 2 * g @ saved[0].T))
    weights, x, cotangent = (jnp.full(shape, 0.1, jnp.bfloat16) for shape in ((4, 3), (512, 4), (512, 3)))
    wide, _ = changed(lambda w, x: doubled(2, w, x), ((), ()), weights, x, wide=True)
    pulls = [jax.vjp(fn, weights, x)[1] for fn in (wide, lambda w, x: doubled(2, w, x))]
    (by_weights, by_x), (expected, by_x_expected) = (pull(cotangent) for pull in pulls)
    np.testing.assert_array_equal(by_x, by_x_expected)
    np.testing.assert_allclose(by_weights.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2)
    dots = [e for e in jx.body(jax.make_jaxpr(pulls[0])(cotangent)).eqns if e.primitive.name == "dot_general"]
    assert sorted(jx.dtype_of(e.outvars[0]).name for e in dots) == ["bfloat16", "float32"]


@pytest.mark.parametrize(("groups", "dtype"), [((), "float32"), ((6,), "bfloat16"), ((3, 2), "float32"), ((2, 1, 3), "bfloat16")])
def test_sums_of_groups_keep_their_type(groups, dtype):
    x = jnp.arange(12 if groups else 2, dtype=dtype).reshape(-1, 2)
    found = sum_of_groups(x, groups)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(x, np.float32).sum(0))
