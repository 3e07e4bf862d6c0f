"""Which functions of rows and weights are proven to be matmuls, and the type in which they sum the gradient of the weights."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jgt
from jgt.program import jaxpr as jx
from jgt.program.places import Place
from jgt.replacements.gradients import SummedGradients
from jgt.replacements.proof import matmul_of
from jgt.replacements.replacement import Site

ROWS, WEIGHTS = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)


def proven(fn):
    """The type of the sums, if the first equation of a function is a matmul."""
    matmul = matmul_of(jx.body(jax.make_jaxpr(fn)(ROWS, WEIGHTS)).eqns[0])
    return None if matmul is None else matmul.sums.name


def test_a_matmul_with_wide_gradients_sums_in_f32():
    site = Site(
        mesh=jgt.abstract_mesh({"data": 2}),
        free=lambda dims, _: dims,
        parameters=[SimpleNamespace(shape=WEIGHTS.shape, dims=((), ()))],
        is_whole=True,
    )
    program = jax.make_jaxpr(lambda w, x: x @ w)(WEIGHTS, ROWS)
    wide = SummedGradients(jgt.make_rules({"default": "replicate"}), is_wide=True).apply(program, Place(), site).program
    assert matmul_of(jx.body(wide).eqns[0]).sums.name == "float32"


def test_a_plain_matmul_sums_in_the_type_of_the_weights():
    assert proven(jnp.matmul) == "bfloat16"


@pytest.mark.parametrize("cast", ["rows", "weights"])
def test_a_derivative_that_rounds_anything_else_is_not_that_of_a_matmul(cast):
    def rounded(x):
        return x.astype(jnp.float16).astype(x.dtype)

    @jax.custom_vjp
    def dot(x, w):
        return x @ w

    def backward(residuals, cotangent):
        x, w = residuals
        by_rows, by_weights = cotangent @ w.T, jnp.einsum("bsk,bsn->kn", rounded(x) if cast == "weights" else x, cotangent)
        return rounded(by_rows) if cast == "rows" else by_rows, by_weights

    dot.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    assert proven(dot) is None
