"""Arrays made of one parameter, through the equations that leave them so."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from jgt.planner.needs.equations import View, contractions, into, out_of, through
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.tracing import trace

STACK = View(0, (("stage",), ("fsdp",), ("tensor",)), Fraction(1))


def followed(fn):
    """The views of a stack [4, 6, 8] that a function makes, by its last variable; None where the trail ends."""
    program, _ = trace(fn, jnp.ones((4, 6, 8)))
    views = {jx.body(program).invars[0]: STACK}
    for equation in jx.body(program).eqns:
        found = through(equation, views, Fraction(1))
        if found is not None:
            views[equation.outvars[0]] = found[1]
    return views.get(jx.body(program).eqns[-1].outvars[0])


@pytest.mark.parametrize(
    ("fn", "dims", "share"),
    [
        (lambda w: w.astype(jnp.bfloat16), STACK.dims, 1),
        (lambda w: w * 2, STACK.dims, 1),
        (lambda w: w.transpose(0, 2, 1), (("stage",), ("tensor",), ("fsdp",)), 1),
        (lambda w: jax.lax.slice(w, (1, 0, 0), (2, 6, 8)), STACK.dims, Fraction(1, 4)),
        (lambda w: w.reshape(2, 2, 6, 8), ((), (), ("fsdp",), ("tensor",)), 1),
        (lambda w: jax.lax.broadcast(w, (3,)), ((), *STACK.dims), 1),
    ],
    ids=["cast", "scaled", "turned", "a slice", "in groups", "repeated"],
)
def test_a_view_stays_one(fn, dims, share):
    view = followed(fn)
    assert (view.dims, view.share) == (dims, share)


def test_the_trail_ends_where_another_array_is_involved():
    assert followed(lambda w: w + jnp.ones((4, 6, 8))) is None


def test_a_scan_takes_a_part_and_stacks_what_it_keeps():
    program, _ = trace(lambda w: jax.lax.scan(lambda _, one: (None, one * 2), None, w)[1], jnp.ones((4, 6, 8)))
    (scan,) = jx.body(program).eqns
    (inner,) = subprograms(scan)
    layer = into(STACK, scan.invars[0], jx.body(inner).invars[0], Fraction(4))
    assert layer == View(0, STACK.dims[1:], Fraction(1, 4), Fraction(4))
    assert out_of(layer, jx.body(inner).outvars[0], scan.outvars[0], Fraction(1)) == View(0, ((), *STACK.dims[1:]), Fraction(1))


@pytest.mark.parametrize(
    ("fn", "axes"),
    [(lambda w, x: x @ w, {"fsdp"}), (lambda w, x: jnp.einsum("de,be->bd", w, jnp.concatenate([x, x], 1)[:, :8]), {"tensor"})],
    ids=["its rows", "its columns"],
)
def test_a_matmul_sums_over_the_axes_of_its_dim(fn, axes):
    program, _ = trace(fn, jnp.ones((6, 8)), jnp.ones((3, 6)))
    view = View(0, STACK.dims[1:], Fraction(1))
    views = {jx.body(program).invars[0]: view}
    assert [found for equation in jx.body(program).eqns for _, found in contractions(equation, views)] == [axes]
