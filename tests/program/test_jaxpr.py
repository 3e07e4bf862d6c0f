"""What jgt relies on in the programs of JAX, one test for each fact."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from nesting import X, only

from jgt.program import jaxpr as jx
from jgt.program.tracing import evaluate, trace


def test_a_dropped_result_and_a_literal_are_recognised():
    equation = only(jax.make_jaxpr(lambda x: x * 2.0)(X), having="mul")
    assert [jx.is_var(a) for a in equation.invars] == [True, False]
    assert not jx.is_dropped(equation.outvars[0])
    assert jx.is_dropped(jex.DropVar(equation.outvars[0].aval))


def test_a_program_with_constants_keeps_them():
    constant = np.arange(3.0, dtype=np.float32)
    program, _ = trace(lambda x: x + constant, jnp.zeros(3))
    same = jx.with_body(program, eqns=jx.body(program).eqns, outvars=jx.body(program).outvars)
    np.testing.assert_array_equal(evaluate(same, [jnp.zeros(3)])[0], constant)
