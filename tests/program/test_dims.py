"""The dims that a reshape maps to each other, compared with where it moves each element."""

import itertools
import math

import numpy as np
import pytest

from jgt.program.dims import reshape_runs

SHAPES = [shape for rank in range(5) for shape in itertools.product((1, 2, 3, 6), repeat=rank) if math.prod(shape) in (1, 6, 36)]
PAIRS = [(old, new) for old, new in itertools.product(SHAPES, SHAPES) if math.prod(old) == math.prod(new)]


def positions(numbers, shape, dims):
    """The place of each element along some dims of an array of these shapes, counted in their order."""
    index = np.unravel_index(numbers, shape) if shape else ()
    total = np.zeros_like(numbers)
    for dim in dims:
        total = total * shape[dim] + index[dim]
    return total


@pytest.mark.parametrize("size", [1, 6, 36])
def test_runs_hold_the_same_elements_and_are_the_shortest(size):
    numbers = np.arange(size)
    for old, new in PAIRS:
        if math.prod(old) != size:
            continue
        runs = list(reshape_runs(old, new))
        assert [dim for before, _ in runs for dim in before] == list(range(len(old)))
        assert [dim for _, after in runs for dim in after] == list(range(len(new)))
        for before, after in runs:
            assert np.array_equal(positions(numbers, old, before), positions(numbers, new, after)), (old, new)
            for m, n in itertools.product(range(len(before) + 1), range(len(after) + 1)):
                is_part = (m, n) not in ((0, 0), (len(before), len(after)))
                first, second = positions(numbers, old, before[:m]), positions(numbers, new, after[:n])
                # A dim of size 1 ends a run of its own, or belongs to the last one.
                if is_part and m and n and after[n:] and before[m:]:
                    assert not np.array_equal(first, second), (old, new, before, after)


@pytest.mark.parametrize(("old", "new"), [((0, 2), (0, 5)), ((2, 0), (0, 5)), ((3, 0), (0,)), ((0,), (0, 3))])
def test_runs_of_an_empty_array_end(old, new):
    runs = list(reshape_runs(old, new))
    assert [dim for before, _ in runs for dim in before] == list(range(len(old)))
    assert [dim for _, after in runs for dim in after] == list(range(len(new)))
