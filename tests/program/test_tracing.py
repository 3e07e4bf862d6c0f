"""What jgt relies on when JAX traces a function and runs a program, one test for each fact."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from nesting import NESTING, X
from next_checkpoint import asks_policies, next_checkpoint

from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.tracing import evaluate, tensor_name, trace
from jgt.signal import tensor


@pytest.mark.parametrize("kind", NESTING)
def test_a_program_can_be_evaluated_and_differentiated(kind):
    if kind == "while":
        pytest.skip("a loop of unknown length has no gradient")
    fn = NESTING[kind][0]
    first = lambda x: jax.tree.leaves(fn(x))[0]  # noqa: E731
    program, _ = trace(first, X)
    value, gradient = jax.value_and_grad(lambda x: evaluate(program, [x])[0])(X)
    expected, expected_gradient = jax.value_and_grad(first)(X)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


def test_trace_takes_shapes_and_returns_the_tree():
    program, tree = trace(lambda x: {"a": x, "b": (x, x)}, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert jax.tree.unflatten(tree, [1, 2, 3]) == {"a": 1, "b": (2, 3)}
    assert isinstance(program, jex.Jaxpr | jex.ClosedJaxpr)


def test_a_named_value_is_recognised():
    program, _ = trace(lambda x: jnp.sin(tensor(x, "heads")), X)
    assert [tensor_name(e) for e in jx.body(program).eqns] == ["heads", None]
    with next_checkpoint():
        program, _ = trace(jax.checkpoint(lambda x: jnp.sin(tensor(x, "heads"))), X)
    assert [tensor_name(e) for e in jx.body(next(subprograms(jx.body(program).eqns[0]))).eqns] == ["heads", None]


@pytest.mark.parametrize("is_next", [False, pytest.param(True, marks=asks_policies)])
def test_a_remat_policy_is_asked_about_names(is_next):
    asked = []

    def policy(primitive, *_, **params):
        asked.append(primitive.name == "name" and params["name"])
        return False

    with next_checkpoint(is_next):
        program, _ = trace(jax.checkpoint(lambda x: jnp.sin(tensor(jnp.sin(x), "h")), policy=policy), X)
        jax.make_jaxpr(jax.grad(lambda x: evaluate(program, [x])[0]))(X)
    assert "h" in asked
    # The next implementation asks about names, matmuls and convolutions alone.
    assert (False in asked) is not is_next
