"""Reading rewritten programs, and comparing them with the originals."""

import jax
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.places import Place, place_of


def constraints(fn, *args, **kwargs):
    """(signal path, spec) of each sharding constraint of a program below a signal, in order."""
    return [(path, spec) for path, spec in all_constraints(fn, *args, **kwargs) if path]


def all_constraints(fn, *args, **kwargs):
    """The same, including constraints outside of signals: those of parameters and inputs."""
    found = []

    def walk(program, around):
        for equation in jx.body(program).eqns:
            place = place_of(equation, around)
            if equation.primitive.name == "sharding_constraint":
                found.append((place.path, equation.params["sharding"].spec))
            for inner in subprograms(equation):
                walk(inner, place)

    walk(jax.make_jaxpr(lambda args, kwargs: fn(*args, **kwargs))(args, kwargs), Place())
    return found


def assert_same(got, want, atol=1e-6):
    """Trees of arrays are equal to within `atol`."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


def derivatives(fn, *args):
    """The outputs of the compiled `fn`, and the gradient of their mean square with respect to the first argument."""

    def scalar(*args):
        out = fn(*args)
        return (out**2).mean(), out

    return jax.jit(jax.grad(scalar, has_aux=True))(*args)


def assert_same_derivatives(sharded, plain, *args, atol=1e-6):
    """Both functions have the same values, and the same gradients with respect to the first argument."""
    assert_same(derivatives(sharded, *args), derivatives(plain, *args), atol)
