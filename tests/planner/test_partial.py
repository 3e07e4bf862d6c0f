"""How far sums in parts stay in parts."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jgt.planner.needs.partial import PartialSum, carry
from jgt.program import jaxpr as jx
from jgt.program.tracing import trace

TENSOR = NamedSharding(AbstractMesh((4,), ("tensor",), axis_types=(AxisType.Auto,)), PartitionSpec("tensor"))


def followed(fn, *, axes=("tensor", "tensor"), adds_first=True):
    """The sums that are left of the results of a function's matmuls, one for each axis, and how many of the other equations kept them."""
    program, _ = trace(fn, *[jnp.ones((4, 4))] * 2)
    sums, found, kept, rest = {}, [], [], list(axes)
    for equation in jx.body(program).eqns:
        if equation.primitive.name == "dot_general":
            found.append(PartialSum("", (rest.pop(0),), Fraction(1)))
            sums[equation.outvars[0]] = found[-1], True
        else:
            carry(equation, sums, found, adds_first=adds_first)
            kept.append(sums.get(equation.outvars[0], (None, False))[1])
    return found, kept


@pytest.mark.parametrize(
    ("axes", "adds_first", "number"), [(("tensor",) * 2, True, 1), (("tensor",) * 2, False, 2), (("tensor", "data"), True, 2)]
)
def test_two_sums_over_the_same_axes_are_one(axes, adds_first, number):
    found, kept = followed(lambda x, y: x @ y + y @ x, axes=axes, adds_first=adds_first)
    assert len(found) == number
    assert kept == [len(set(axes)) == 1]


def test_changes_of_shape_and_type_keep_a_sum_in_parts_and_functions_need_the_whole():
    _, kept = followed(lambda x, y: jnp.tanh((x @ y).T.astype(jnp.bfloat16).reshape(16)))
    assert kept == [True, True, True, False]


@pytest.mark.parametrize(
    ("fn", "is_split"),
    [
        (lambda x, y: jax.lax.with_sharding_constraint(x @ y, TENSOR), True),
        (lambda x, y: jax.lax.with_sharding_constraint(x + x @ y, TENSOR), True),
        (lambda x, y: jax.lax.with_sharding_constraint(jnp.tanh(x @ y), TENSOR), False),
    ],
    ids=["itself", "with another value", "behind a function"],
)
def test_a_constraint_splits_a_sum(fn, is_split):
    (one,), _ = followed(fn)
    assert one.is_split == is_split
