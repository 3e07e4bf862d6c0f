"""Which functions of rows and weights are proven to be matmuls, and the type in which they sum the gradient of the weights."""

import jax
import jax.numpy as jnp
import pytest

from jgt.program import jaxpr as jx
from jgt.replacements.proof import matmul_of
from train.models.linear import Dot

ROWS, WEIGHTS = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)


def proven(fn):
    """The type of the sums, if the first equation of a function is a matmul."""
    matmul = matmul_of(jx.body(jax.make_jaxpr(fn)(ROWS, WEIGHTS)).eqns[0])
    return None if matmul is None else matmul.sums.name


@pytest.mark.parametrize(("wide", "sums"), [(False, "bfloat16"), (True, "float32")])
def test_a_linear_layer_is_a_matmul_in_either_type(wide, sums):
    assert proven(lambda x, w: Dot(has_wide_gradients=wide)(x, w, (((2,), (0,)), ((), ())))) == sums


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
