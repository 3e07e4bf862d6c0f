"""Low-rank updates: a function with updates is the function of the sums W + scale · A · B, in every form that a matrix takes on its way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgt import InputError, Matrix, make_rules, signal
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.places import Place, line_of, place_of

SCALE, RANK = 0.7, 2
B, D, N, H, F, L = 3, 8, 2, 4, 6, 3
"""Rows, width, heads, size of a head, hidden units, layers."""


def heads(p, x):
    y = jnp.einsum("bd,dnh->bnh", x, p["w"].reshape(D, N, H))
    return jnp.sum(jnp.tanh(y) ** 2)


def layers(p, x):
    def layer(x, w):
        with signal.context("layers"):
            return x + jnp.tanh(x @ w["up"].astype(jnp.float32)) @ w["down"], None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)


def indexed(p, x):
    def layer(i, x):
        return jnp.tanh(x @ p["w"][i])

    return jnp.sum(jax.lax.fori_loop(0, L, layer, x))


def unrolled(p, x):
    for w in p["w"]:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def by_index(p, x):
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda w, x: jnp.sin(x @ w), lambda w, x: jnp.cos(x @ w * 2), p["w"], x))


def of_group(p, x):
    return jnp.sum(jax.lax.ragged_dot(x, p["w"], jnp.array([1, 2], jnp.int32)) ** 2)


def stacked(p, x):
    return jnp.sum(jnp.einsum("nbd,ndf->nbf", jnp.stack([x, 2 * x]), p["w"]) ** 2)


def both_ways(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"].T)


def columns(p, x):
    left, right = p["w"][:, : F // 2], p["w"][:, F // 2 :]
    return jnp.sum(jnp.tanh(x @ left) * jnp.sin(x @ right))


def divided(p, x):
    left, right = jnp.split(p["w"], 2, axis=1)
    return jnp.sum(jnp.tanh(x @ left) * jnp.sin(x @ right))


def from_the_left(p, x):
    return jnp.sum(jnp.tanh(jnp.transpose(p["w"])[None] @ x.T[None]) ** 2)


def general(p, x):
    y = jnp.einsum("bnh,nhd->bd", x.reshape(B, N, H), p["w"])
    return jnp.sum(jnp.tanh(y))


def of_vmap(p, x):
    return jnp.sum(jax.vmap(lambda row: jnp.tanh(jax.jit(jnp.dot)(row, p["w"])))(x))


FUNCTIONS = {
    heads: {"w": (D, N * H)},
    layers: {"up": (L, D, F), "down": (L, F, D)},
    indexed: {"w": (L, D, D)},
    unrolled: {"w": (L, D, D)},
    by_index: {"w": (D, F)},
    of_group: {"w": (2, D, F)},
    stacked: {"w": (2, D, F)},
    both_ways: {"w": (D, F)},
    columns: {"w": (D, F)},
    divided: {"w": (D, F)},
    from_the_left: {"w": (D, F)},
    general: {"w": (N, H, D)},
    of_vmap: {"w": (D, F)},
}


def random(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape) / 2


def made(fn, shapes):
    """Parameters, x, the matrices, and the two factors of each."""
    params, x = {name: random(n, shape) for n, (name, shape) in enumerate(shapes.items())}, random(9, (B, D))
    matrices = {m.path: m for m in Matrix.all_of(fn, *jax.eval_shape(lambda: (params, x)))}
    factors = {
        name: [random(10 * n + k + 20, shape) for k, shape in enumerate(m.factor_shapes(RANK))]
        for n, (name, m) in enumerate(matrices.items())
    }
    return params, x, matrices, factors


def updated(fn, matrices, params, x, factors):
    updates = {name: m.update(*factors[name], scale=SCALE) for name, m in matrices.items()}
    return Matrix.with_updates(fn, updates)(params, x)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_a_function_with_updates_is_the_function_of_the_sums(fn):
    params, x, matrices, factors = made(fn, FUNCTIONS[fn])
    assert not any(m.problem for m in matrices.values()), matrices

    def slow(factors):
        sums = {name: w + SCALE * matrices[name].product(*factors[name]) for name, w in params.items()}
        return fn(sums, x)

    def both(factors):
        return jax.value_and_grad(lambda f: updated(fn, matrices, params, x, f))(factors), jax.value_and_grad(slow)(factors)

    (value, gradient), (wanted, wanted_gradient) = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(factors)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), gradient, wanted_gradient)


def test_dims_of_matrices():
    shapes = {"w": jax.ShapeDtypeStruct((N, H, D), jnp.float32)}
    (matrix,) = Matrix.all_of(general, shapes, jax.ShapeDtypeStruct((B, D), jnp.float32))
    assert (matrix.stack, matrix.inputs, matrix.outputs) == ((), (0, 1), (2,))
    assert matrix.factor_shapes(3) == ((N, H, 3), (3, D))
    shapes = {"up": jax.ShapeDtypeStruct((L, D, F), jnp.float32), "down": jax.ShapeDtypeStruct((L, F, D), jnp.float32)}
    down, up = Matrix.all_of(layers, shapes, jax.ShapeDtypeStruct((B, D), jnp.float32))
    assert (up.stack, up.inputs, up.outputs, up.use.signals) == ((0,), (1,), (2,), ("layers",))
    assert down.factor_shapes(3) == ((L, F, 3), (L, 3, D))


def looked_up(p, x):
    return jnp.sum(x @ p["w"]) + jnp.sum(p["w"][jnp.array([0, 1])])


def penalised(p, x):
    return jnp.sum(x @ p["w"]) + jnp.sum(p["w"] ** 2)


def normed(p, x):
    return jnp.sum(x @ (p["w"] / jnp.linalg.norm(p["w"])))


def convolved(p, x):
    return jnp.sum(jnp.convolve(x[0], p["w"][0]))


@jax.custom_vjp
def own_rule(x, w):
    return x @ w


own_rule.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (looked_up, "is read by gather"),
        (penalised, "is read by"),
        (normed, "is read by"),
        (convolved, "is read by"),
        (lambda p, x: jnp.sum(own_rule(x, p["w"])), "is read by custom_vjp_call"),
        (lambda p, x: jnp.sum(x), "is not read by a matmul"),
        (lambda p, x: jnp.sum(x @ p["w"] @ p["w"].T), ""),
        (lambda p, x: jnp.sum(x.reshape(-1)[:12] * (p["w"].reshape(-1)[:12])), "is read by mul"),
        (lambda p, x: jax.lax.scan(lambda c, w: (c + jnp.sum(w), None), 0.0, p["w"])[0], "is read by reduce_sum"),
        (lambda p, x: jnp.sum(x[:, :2] @ p["w"].reshape(2, D * F // 2)), "contract different dims"),
    ],
)
def test_other_uses_are_problems_with_their_line(fn, problem):
    shapes = {"w": jax.ShapeDtypeStruct((D, F), jnp.float32)}
    (matrix,) = Matrix.all_of(fn, shapes, jax.ShapeDtypeStruct((B, D), jnp.float32))
    assert problem in matrix.problem
    if "is read by" in problem and "matmul" not in problem:
        assert "test_updates.py:" in matrix.problem


def test_an_update_that_meets_another_operation_is_refused():
    params, x, matrices, factors = made(heads, FUNCTIONS[heads])
    with pytest.raises(InputError, match=r"w: the parameter is read by .*, but only matmuls can be adapted"):
        updated(lambda p, x: jnp.sum(jnp.exp(p["w"])), matrices, params, x, factors)


def test_signals_and_lines_stay():
    params, x, matrices, factors = made(layers, FUNCTIONS[layers])
    program = jax.make_jaxpr(lambda f: updated(layers, matrices, params, x, f))(factors)
    found = []

    def walk(program):
        for equation in jx.body(program).eqns:
            if equation.primitive.name == "dot_general":
                found.append((place_of(equation, Place()).path, line_of(equation).rsplit("/")[-1].partition(":")[0]))
            for inner in subprograms(equation):
                walk(inner)

    walk(program)
    assert found == [("layers", "test_updates.py")] * 6


def test_rules_of_factors_follow_the_matrix():
    shapes = {"up": jax.ShapeDtypeStruct((L, D, F), jnp.float32), "down": jax.ShapeDtypeStruct((L, F, D), jnp.float32)}
    matrices = {m.path: m for m in Matrix.all_of(layers, shapes, jax.ShapeDtypeStruct((B, D), jnp.float32))}
    named = {(f"{name}_a", f"{name}_b"): m for name, m in matrices.items()}
    rules = make_rules({"signals": {"layers": {"params": {"up": ["x", "y"], "down": ["y", "x"], "down_a": [None, None]}}}})
    made = {rule.pattern: rule.spec for rule in Matrix.with_rules(rules, named).params}
    assert made == {"up_a": (("x",), ()), "up_b": ((), ("y",)), "down_b": ((), ("x",))}
    # One pattern for all is about the matrices.
    rules = make_rules({"params": {"*": ["x", "y"]}})
    made = {rule.pattern: rule.spec for rule in Matrix.with_rules(rules, named).params}
    assert made["down_a"] == (("x",), ()) and made["down_b"] == ((), ("y",))


def test_dropout_is_of_what_the_update_reads():
    params, x, matrices, factors = made(heads, FUNCTIONS[heads])
    (a, b), matrix = factors["w"], matrices["w"]
    key = jax.random.key_data(jax.random.key(3))
    update = matrix.update(a, b, scale=SCALE, dropout=0.5, key=key)
    y = Matrix.with_updates(lambda p, x: x @ p["w"], {"w": update})(params, x)
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    np.testing.assert_allclose(y, x @ params["w"] + SCALE * (jnp.where(kept, x / 0.5, 0) @ a) @ b, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_stack_that_one_matmul_reads():
    def stacked(params, x):
        return jnp.einsum("bnd,ndf->bnf", x, params["w"])

    params, x = {"w": jnp.ones((2, 8, 6))}, jnp.ones((3, 2, 8))
    (matrix,) = Matrix.all_of(stacked, *jax.eval_shape(lambda: (params, x)))
    a, b = (jnp.ones(shape) for shape in matrix.factor_shapes(2))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
    y = Matrix.with_updates(stacked, {"w": matrix.update(a, b, scale=SCALE, dropout=0.5, key=keys)})(params, x)
    # An output is 8 without the update, and with it 2 · SCALE more for each of the 8 inputs that is kept, which count twice.
    kept = (y - 8) / (4 * SCALE)
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    assert 0 < kept.mean() < 8 and kept.std() > 0


def test_a_module_of_flax():
    module = nnx.MultiHeadAttention(num_heads=N, in_features=D, qkv_features=N * H, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    params = nnx.to_pure_dict(state)

    def call(params, x):
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return jnp.sum(nnx.merge(graph, filled)(x) ** 2)

    found = {m.path: m for m in Matrix.all_of(call, *jax.eval_shape(lambda: (params, jnp.zeros((2, 5, D)))))}
    kernels = {path: m for path, m in found.items() if path.endswith("kernel")}
    assert {path.partition("/")[0] for path, m in kernels.items() if not m.problem} == {"query", "key", "value", "out"}
    assert isinstance(kernels["out/kernel"], Matrix) and kernels["out/kernel"].inputs == (0, 1)
