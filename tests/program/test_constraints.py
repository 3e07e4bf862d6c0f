"""Constraints and checkpoints that are added to a program, and what they rely on in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nesting import X, only
from next_checkpoint import ASKS_POLICIES, next_checkpoint

import jgt
from jgt.program import jaxpr as jx
from jgt.program.constraints import constraint_equations, ignores_policy, wrap_in_checkpoint
from jgt.program.equations import is_remat, subprograms, with_params
from jgt.program.places import Place, place_of
from jgt.program.tracing import evaluate, trace
from jgt.signal import context, tensor


def pinned(forward, backward):
    program, _ = trace(context("s")(jnp.sin), jnp.ones(8))
    equation = only(program, having="sin")
    new, var = constraint_equations(equation.outvars[0], forward, backward, equation)
    return jx.with_body(program, eqns=[*jx.body(program).eqns, *new], outvars=[var]), new


def test_a_constraint_takes_the_place_of_its_equation():
    sharding = NamedSharding(jgt.make_mesh({"data": 8}), P("data"))
    program, new = pinned(sharding, sharding)
    assert [place_of(e, Place()).path for e in new] == ["s"]
    np.testing.assert_allclose(evaluate(program, [jnp.ones(8)])[0], jnp.sin(jnp.ones(8)))
    assert jax.jit(lambda x: evaluate(program, [x])[0])(jnp.ones(8)).sharding.is_equivalent_to(sharding, 1)


def test_a_constraint_with_another_backward_pins_the_cotangent_at_its_signal():
    mesh = jgt.make_mesh({"data": 8})
    program, new = pinned(NamedSharding(mesh, P()), NamedSharding(mesh, P("data")))
    assert {place_of(e, Place()).path for e in new} == {"s"}
    gradient = jax.grad(lambda x: evaluate(program, [x])[0].sum())
    np.testing.assert_allclose(gradient(jnp.ones(8)), jnp.cos(jnp.ones(8)), rtol=1e-6)
    pins = [e for e in jx.body(jax.make_jaxpr(gradient)(jnp.ones(8))).eqns if e.primitive.name == "sharding_constraint"]
    assert [str(e.params["sharding"].spec) for e in pins][-1] == str(P("data"))
    assert place_of(pins[-1], Place()).path == "s"


def test_a_policy_that_jax_does_not_ask_is_known():
    with next_checkpoint():
        program, _ = trace(jax.checkpoint(lambda x: jnp.sin(tensor(jnp.sin(x), "h"))), X)
    (equation,) = jx.body(program).eqns
    keeps = [ignores_policy(with_params(equation, policy=lambda *_, **__: answer)) for answer in (True, False)]
    assert keeps == [not ASKS_POLICIES, False]


@pytest.mark.parametrize("in_scan", [False, True])
def test_a_program_can_be_put_into_a_checkpoint(in_scan):
    program, _ = trace(lambda x: jnp.sin(tensor(jnp.sin(x), "h")), X)
    inside = wrap_in_checkpoint(program, jax.checkpoint_policies.save_only_these_names("h"), in_scan=in_scan)
    (equation,) = jx.body(inside).eqns
    assert is_remat(equation)
    assert equation.params["prevent_cse"] is not in_scan
    np.testing.assert_allclose(evaluate(inside, [X])[0], jnp.sin(jnp.sin(X)), rtol=1e-6)


def test_a_checkpoint_keeps_the_signature_weak_types_included():
    program = jax.make_jaxpr(lambda x: x * 2)(1.0)
    inside = wrap_in_checkpoint(program, jax.checkpoint_policies.nothing_saveable, in_scan=True)
    assert [v.aval for v in jx.body(inside).invars] == [v.aval for v in jx.body(program).invars]
    assert [v.aval for v in jx.body(inside).outvars] == [v.aval for v in jx.body(program).outvars]
    assert jx.body(inside).invars[0].aval.weak_type


def test_a_checkpoint_keeps_the_signals():
    program, _ = trace(context("s")(jnp.sin), X)
    (equation,) = jx.body(wrap_in_checkpoint(program, jax.checkpoint_policies.nothing_saveable, in_scan=False)).eqns
    inner = next(subprograms(equation))
    assert place_of(only(inner, having="sin"), Place()).path == "s"
