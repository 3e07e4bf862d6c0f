"""On CPUs the rows are the left operand of the matmul that makes a matrix's gradient, and the gradient stays."""

import jax
import jax.numpy as jnp
import pytest

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms

MESH = jgt.make_mesh({"data": 2, "fsdp": 4})
RULES = {"axes": {"batch": ["data", "fsdp"]}, "params": {"**": ["fsdp", ...]}, "default": "replicate"}


def two_matmuls(params, x):
    y = jnp.einsum("rk,kn->rn", x, params["w"])
    return jnp.sum(jnp.tanh(jnp.einsum("nk,rn->rk", params["v"], y)) ** 2)


def made(shape):
    rows, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (k, n)), "v": jax.random.normal(keys[1], (n, k))}
    return params, jax.random.normal(keys[2], (rows, k))


def left_sizes(loss, arguments, rows):
    """The number of columns of the left operand of each matmul that sums over rows."""
    found = []

    def search(program):
        for equation in jx.body(program).eqns:
            if equation.primitive.name == "dot_general":
                ((summed, _), _), shape = equation.params["dimension_numbers"], jx.shape_of(equation.invars[0])
                found.extend(shape[1 - dim] for dim in summed if shape[dim] == rows)
            for inner in subprograms(equation):
                search(inner)

    search(jax.make_jaxpr(jax.grad(loss))(*arguments))
    return sorted(found)


@pytest.mark.parametrize("shape", [(16, 12, 4), (16, 4, 12)])
def test_rows_are_on_the_left(shape):
    arguments, (rows, k, n) = made(shape), shape
    sharded = jgt.shard(two_matmuls, RULES, MESH, reverse_mode=True)
    # Rows of w have k columns, and those of v have n.
    assert left_sizes(sharded, arguments, rows) == sorted([k, n])
    expected, gradients = jax.grad(two_matmuls)(*arguments), jax.jit(jax.grad(sharded))(*arguments)
    assert all(jnp.max(jnp.abs(gradients[key] - x)) <= 1e-5 * jnp.max(jnp.abs(x)) for key, x in expected.items())


def test_without_the_promise_a_program_can_be_differentiated_forward():
    params, x = made((16, 12, 4))
    for mesh in (MESH, jgt.make_mesh({"data": -1})):
        sharded = jgt.shard(two_matmuls, {"axes": {"batch": ["data"]}, "default": "replicate"}, mesh)
        _, slope = jax.jvp(lambda params: sharded(params, x), (params,), (params,))
        assert slope == pytest.approx(float(jax.jvp(lambda params: two_matmuls(params, x), (params,), (params,))[1]), rel=1e-4)
