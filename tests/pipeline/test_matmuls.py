"""Matmuls without dims of size 1: the same numbers, from one array for all readers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgt.pipeline.matmuls import without_unit_dims
from jgt.program import jaxpr as jx
from jgt.program.parts import extract_part, flatten
from jgt.program.tracing import trace

FUNCTIONS = {
    "both gradients of a matmul": lambda x, w: jax.vjp(lambda x, w: jnp.einsum("bsd,df->bsf", x, w), x, w)[1](jnp.sin(x @ w)),
    "a batch of matmuls": lambda x, w: [jnp.einsum("bsd,btd->bst", x, x)],
    "contracted dims of size 1": lambda x, w: [jnp.einsum("bsd,bte->sdte", x, x), x[0, :, :1] @ w[:1]],
    "vectors": lambda x, w: [jnp.dot(x[0, 0], w), jnp.dot(x[0, :1], w[:, :1])],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_are_the_same(name):
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(1, 4, 6), (6, 5)]))
    flat = flatten(trace(FUNCTIONS[name], x, w)[0])
    found = extract_part(without_unit_dims(flat), flat.outvars)
    known = dict(zip(flat.invars, (x, w), strict=True))
    values = found([known[v] for v in found.inputs])
    for value, wanted in zip(values, jax.tree.leaves(FUNCTIONS[name](x, w)), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)


def test_two_matmuls_read_one_array_without_its_row():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 4, 6), (6, 5))]
    flat = without_unit_dims(flatten(trace(FUNCTIONS["both gradients of a matmul"], *shapes)[0]))
    first, *others = [e for e in flat.eqns if e.primitive is jax.lax.dot_general_p][-2:]
    assert set(first.invars) & set(*(e.invars for e in others))
    assert all(len(jx.shape_of(atom)) == 2 for e in (first, *others) for atom in e.invars)
