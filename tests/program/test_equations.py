"""What jgt relies on in the equations of JAX, one test for each fact. If a new JAX changes one of them, it fails here first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nesting import NESTING, X, hijax, nesting_equation, next_remat, only, with_jvp, with_vjp

from jgt.program import jaxpr as jx
from jgt.program.dataflow import unchanged_arguments
from jgt.program.equations import is_remat, is_scan, map_subprograms, outer_operands, outer_results, subprograms
from jgt.program.tracing import evaluate, trace


@pytest.mark.parametrize("kind", NESTING)
def test_every_program_inside_an_equation_is_found(kind):
    fn, count = NESTING[kind]
    _, equation = nesting_equation(fn)
    programs = list(subprograms(equation))
    assert len(programs) == count
    assert all(jx.body(p).eqns for p in programs)


@pytest.mark.parametrize("kind", NESTING)
def test_programs_inside_an_equation_can_be_replaced(kind):
    fn, _ = NESTING[kind]
    program, equation = nesting_equation(fn)

    def negate(inner):
        # sin becomes cos.
        cos = only(jax.make_jaxpr(jnp.cos)(X), having="cos").primitive
        eqns = [e.replace(primitive=cos) if e.primitive.name == "sin" else e for e in jx.body(inner).eqns]
        return jx.with_body(inner, eqns=eqns, outvars=jx.body(inner).outvars)

    new = map_subprograms(equation, negate)
    eqns = [new if e is equation else e for e in jx.body(program).eqns]
    changed = jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
    cosine = {
        "scan": lambda x: jax.lax.scan(lambda h, w: (jnp.cos(h) * w, h), x, jnp.ones((3,))),
        "while": lambda x: (3, _thrice(jnp.cos, x)),
    }
    expected = cosine.get(kind, jnp.cos)(X)
    for got, want in zip(evaluate(changed, [X]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _thrice(fn, x):
    return fn(fn(fn(x)))


@pytest.mark.parametrize("kind", NESTING)
def test_an_equation_whose_programs_stay_is_left_alone(kind):
    _, equation = nesting_equation(NESTING[kind][0])
    assert map_subprograms(equation, lambda inner: inner) is equation


@pytest.mark.parametrize("kind", NESTING)
def test_the_operands_and_results_of_an_inner_program_line_up(kind):
    fn, _ = NESTING[kind]
    _, equation = nesting_equation(fn)
    for inner in subprograms(equation):
        behind = outer_operands(equation, inner)
        assert len(behind) == len(jx.body(inner).invars)
        assert all(o in equation.invars for o in behind)
        assert len(outer_results(equation, inner)) == len(jx.body(inner).outvars)


def test_the_constants_of_a_loops_condition_and_of_its_body_are_told_apart():
    def fn(limit, step, x):
        return jax.lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] * 2, c[1] + step), (x, x))

    (equation,) = jx.body(jax.make_jaxpr(fn)(X, X, X)).eqns
    limit, step, x = equation.invars[:3]
    assert outer_operands(equation, equation.params["cond_jaxpr"]) == [limit, x, x]
    assert outer_operands(equation, equation.params["body_jaxpr"]) == [step, x, x]


def test_the_constants_of_a_linear_solves_programs_are_told_apart():
    def fn(a, b, c, x):
        return jax.lax.custom_linear_solve(lambda y: a * y, x, lambda _, y: y / b, lambda _, y: y / c)

    (equation,) = jx.body(jax.make_jaxpr(fn)(X, X, X, X)).eqns
    a, b, c, x = dict.fromkeys(equation.invars)
    found = [outer_operands(equation, program) for program in subprograms(equation)]
    assert found == [[a, x], [a, x], [b, x], [c, x]]


def test_a_loops_condition_makes_none_of_its_results():
    """The loop carries one value, and so has one result, like its condition."""
    program, _ = trace(lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c, x), X)
    (equation,) = jx.body(program).eqns
    assert outer_results(equation, equation.params["cond_jaxpr"]) == [None]
    assert outer_results(equation, equation.params["body_jaxpr"]) == equation.outvars
    assert unchanged_arguments(program) == [0]


def test_only_a_jvp_or_vjp_rule_hides_in_a_function():
    _, jvp = nesting_equation(with_jvp())
    _, vjp = nesting_equation(with_vjp())
    assert "jvp_jaxpr_fun" in jvp.params
    assert "fwd_jaxpr_thunk" in vjp.params


@pytest.mark.parametrize(("make", "key"), [(with_jvp, "jvp_jaxpr_fun"), (with_vjp, "fwd_jaxpr_thunk")])
def test_the_rule_of_a_derivative_is_changed_when_it_is_asked_for(make, key):
    program, equation = nesting_equation(make())
    seen = []

    def change(inner):
        seen.append([e.primitive.name for e in jx.body(inner).eqns])
        return jx.with_body(inner, eqns=list(jx.body(inner).eqns), outvars=jx.body(inner).outvars)

    new = map_subprograms(equation, change)
    assert len(seen) == 1
    eqns = [new if e is equation else e for e in jx.body(program).eqns]
    changed = jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
    gradient = jax.grad(lambda x: evaluate(changed, [x])[0])(X)
    np.testing.assert_allclose(gradient, jnp.cos(X), rtol=1e-6)
    assert len(seen) == 2, key


def test_a_scan_is_recognised_and_nothing_else_is():
    assert {kind for kind, (fn, _) in NESTING.items() if is_scan(nesting_equation(fn)[1])} == {"scan"}


def test_a_remat_region_is_recognised_and_nothing_else_is():
    assert {kind for kind, (fn, _) in NESTING.items() if is_remat(nesting_equation(fn)[1])} == {"remat", "next remat"}


def test_the_derivative_of_a_primitive_that_is_an_object_is_of_its_new_program():
    program, equation = nesting_equation(hijax)
    new = map_subprograms(equation, lambda _: jax.make_jaxpr(jnp.tanh)(X))
    changed = jx.with_body(program, eqns=[new], outvars=jx.body(program).outvars)
    gradient = jax.jit(jax.grad(lambda x: evaluate(changed, [x])[0]))(X)
    np.testing.assert_allclose(gradient, 2 * jax.grad(jnp.tanh)(X), rtol=1e-6)


def test_a_primitive_that_is_an_object_may_get_arrays_of_another_shape():
    _, equation = nesting_equation(next_remat)
    (old,), (out,) = equation.invars, equation.outvars
    var, new_out = (jx.new_var_of(v, (3,)) for v in (old, out))
    new = map_subprograms(equation.replace(invars=[var], outvars=[new_out]), lambda _: jax.make_jaxpr(jnp.sin)(jnp.ones(3)))
    program = jx.program_of(next(subprograms(equation)), [var], [new], [new_out])
    gradient = jax.grad(lambda x: evaluate(program, [x])[0].sum())(jnp.ones(3))
    np.testing.assert_allclose(gradient, jnp.cos(jnp.ones(3)), rtol=1e-6)
