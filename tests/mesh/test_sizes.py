"""Mesh sizes: read from YAML, filled in, and refused with both numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgt.document import InputError, parse
from jgt.mesh.sizes import MeshSizes


def read(text):
    problems = []
    return MeshSizes.read(parse(text, "f.yaml"), problems), problems


def test_sizes_are_read_in_order():
    sizes, problems = read("{data: 2, fsdp: -1, tensor: 2}")
    assert list(sizes.items()) == [("data", 2), ("fsdp", -1), ("tensor", 2)]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "f.yaml:1: file: a mesh is a mapping of axis names to sizes"),
        ("{}", "f.yaml:1: file: a mesh is a mapping of axis names to sizes"),
        (
            "a: 1\nb: 0",
            "f.yaml:2: b: an axis size is a whole number of at least 1, or -1 for the remaining devices, not the whole number 0",
        ),
        ("a: -2", "f.yaml:1: a: an axis size is"),
        ("a: 2.0", "f.yaml:1: a: an axis size is a whole number of at least 1, or -1 for the remaining devices, not the number 2.0"),
        ("a: true", "f.yaml:1: a: an axis size is a whole number of at least 1, or -1 for the remaining devices, not true"),
        ("{a: -1, b: -1}", "f.yaml:1: file: only one size may be -1; a and b are"),
    ],
)
def test_bad_sizes_are_named(text, problem):
    _, (found,) = read(text)
    assert found.startswith(problem)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_what_is_left_is_filled_in(sizes, data):
    full = {f"a{n}": size for n, size in enumerate(sizes)}
    free = data.draw(st.sampled_from(sorted(full)))
    assert MeshSizes({**full, free: -1}).resolved(math.prod(sizes)) == full
    assert MeshSizes(full).resolved(math.prod(sizes)) == full
    assert MeshSizes(full).problem(math.prod(sizes)) is None
    assert MeshSizes(full).problem(math.prod(sizes) + 1) is not None


def test_without_a_number_of_devices_sizes_stay():
    assert MeshSizes({"a": 3}).resolved(None) == {"a": 3}


@pytest.mark.parametrize(
    ("sizes", "num_devices", "problem"),
    [
        ({"a": 2, "b": 3}, 8, "mesh: a=2 x b=3 = 6 devices, but there are 8. Make the product 8, or one size -1"),
        ({"a": -1, "b": 3}, 8, "mesh: a=-1 x b=3: the other sizes multiply to 3, which does not divide the 8 devices. Make them divide 8"),
        ({"a": -1, "b": 16}, 8, "mesh: a=-1 x b=16: the other sizes multiply to 16"),
        ({"a": -1, "b": -1}, 8, "mesh: only one size may be -1; a and b are"),
        ({"a": -1}, None, "mesh: a=-1: the number of devices is needed to fill in -1"),
        ({"a": 0, "b": -1}, 8, "mesh: the axis a has the size 0. A size is at least 1, or -1 for the remaining devices"),
        ({"a": -2, "b": -4}, 8, "mesh: the axis a has the size -2."),
    ],
)
def test_sizes_that_do_not_cover_the_devices_are_refused(sizes, num_devices, problem):
    with pytest.raises(InputError) as caught:
        MeshSizes(sizes).resolved(num_devices)
    assert str(caught.value).startswith(problem)
