"""Specs become the axes of each dim, and say which dims do not divide."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgt.program.dims import show_dims
from jgt.rules import SpecRule, misfits
from jgt.rules.spec import Misfit

entries = st.lists(st.sampled_from([(), ("a",), ("b",), ("a", "b")]), max_size=4)


def rule(*entries):
    return SpecRule(pattern="x", spec=tuple((entry,) if isinstance(entry, str) else entry or () for entry in entries))


@pytest.mark.parametrize(
    ("spec", "rank", "skip", "dims"),
    [
        ((), 2, (), ((), ())),
        (("a",), 1, (), (("a",),)),
        (("a",), 3, (), (("a",), (), ())),
        ((None, ("a", "b")), 2, (), ((), ("a", "b"))),
        (("a",), 3, {0}, ((), ("a",), ())),
        (("a", "b"), 3, {1}, (("a",), (), ("b",))),
        (("a", "b"), 4, {0, 3}, ((), ("a",), ("b",), ())),
        ((..., "a"), 3, (), ((), (), ("a",))),
        ((..., "a"), 3, {2}, ((), ("a",), ())),
        (("a", ..., "b"), 2, (), (("a",), ("b",))),
        (("a", ..., "b"), 5, range(1), ((), ("a",), (), (), ("b",))),
        ((...,), 0, (), ()),
        ((), 2, {0, 1}, ((), ())),
    ],
)
def test_a_spec_is_expanded(spec, rank, skip, dims):
    assert rule(*spec).dims(rank, skip) == dims


@pytest.mark.parametrize(("spec", "rank", "skip"), [(("a", "b"), 1, ()), (("a",), 1, {0}), (("a", "b"), 2, {1}), (("a", ..., "b"), 1, ())])
def test_a_spec_longer_than_the_tensor_is_refused(spec, rank, skip):
    with pytest.raises(ValueError, match=rf"the spec has {rule(*spec).rank} dims, the tensor {rank - len(skip)}"):
        rule(*spec).dims(rank, skip)


@given(entries, st.integers(0, 3), st.sets(st.integers(0, 4), max_size=2), st.booleans())
def test_expansion_keeps_axes_in_order_and_adds_only_empty_dims(spec, room, skip, dots):
    full = (*spec[:1], ..., *spec[1:]) if dots else tuple(spec)
    rank = max([len(skip) + len(spec) + room, *(dim + 1 for dim in skip)])
    dims = rule(*full).dims(rank, skip)
    assert len(dims) == rank
    assert [axis for dim in dims for axis in dim] == rule(*full).axes
    assert all(dims[dim] == () for dim in skip)


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([(), ("a",), ("b",), ("a", "b"), ("x",)])), max_size=4))
def test_misfits_are_the_dims_with_a_rest(dims):
    mesh = {"a": 2, "b": 3}
    shape, axes = tuple(size for size, _ in dims), tuple(names for _, names in dims)
    expected = [n for n, (size, names) in enumerate(dims) if size % math.prod(mesh.get(a, 1) for a in names)]
    assert [m.dim for m in misfits(axes, shape, mesh)] == expected


def test_a_misfit_carries_both_sizes():
    assert list(misfits((("a", "b"),), (7,), {"a": 2, "b": 3})) == [Misfit(dim=0, size=7, axes=("a", "b"), parts=6)]


@pytest.mark.parametrize(
    ("spec", "rank", "fits"), [(("a",), 1, True), (("a",), 2, False), (("a", ...), 1, True), (("a", ...), 3, True), (("a", ...), 0, False)]
)
def test_a_spec_fits_its_rank(spec, rank, fits):
    assert rule(*spec).fits(rank) is fits


def test_specs_are_shown_as_the_yaml_writes_them():
    assert show_dims((("a",), ("a", "b"), ())) == "[a, [a, b], null]"
