"""Samples of the user's own: which are refused, and what a sample that fails says."""

import grain
import numpy as np
import pytest

from jgt.document import InputError
from train.data.config import OwnData
from train.data.opening import open_own_data
from train.data.own import SampleError, open_own
from train.settings.code.files import Code

NAME = "run.yaml:2: data.source: mine:data"


class Samples:
    """32 equal samples, except for the one of this number."""

    def __init__(self, number=None, other=None):
        self.number, self.other = number, other

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self.number:
            return self.other() if callable(self.other) else self.other
        return {"x": np.zeros(2, np.float32), "y": 0}


def opened(made):
    code = Code(objects={"data.source": lambda: made})
    return open_own(OwnData(source="mine:data"), code, lambda key: "run.yaml:2", seq=1, vocab=1)


def raised(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError("bad sample"), KeyError("a"), StopIteration(), ZeroDivisionError("zero")])
def test_a_sample_that_fails_is_named_with_its_number_and_line(error):
    source = opened(Samples(9, raised(error)))
    data = open_own_data(source, OwnData(source="mine:data", shuffle=False), seed=0)
    batches = data.train_batches(0, 4, range(4))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(SampleError) as caught:
        next(batches)
    line = fail_line()
    expected = f"{NAME}: sample 9 failed: {__file__}:{line}: {type(error).__name__}"
    assert str(caught.value) == f"{expected}: {error}" if str(error) else expected


def fail_line():
    return raised(OSError()).__code__.co_firstlineno + 1


def test_a_sample_that_fails_at_the_start_is_wrong_input():
    with pytest.raises(InputError, match=r"sample 0 failed: .*test_own_data\.py:\d+: OSError: no"):
        opened(Samples(0, raised(OSError("no"))))
    with pytest.raises(InputError, match=r"mine:data \(eval\): sample 0 failed: .*: OSError: no"):
        opened((Samples(), Samples(0, raised(OSError("no")))))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (None, "sample 5 has None, and the first one has ['x', 'y']"),
        ({"x": np.zeros(2)}, "sample 5 has ['x'], and the first one has ['x', 'y']"),
        ({"x": np.zeros(3), "y": 0}, "sample 5: x is float64[3], and float32[2] in the first one"),
        # It would be cut to 0 in silence.
        ({"x": np.zeros(2), "y": 0.5}, "sample 5: y is float64[], and int32[] in the first one"),
        ({"x": np.zeros(2), "y": "a"}, "sample 5: y is <U1[], and int32[] in the first one"),
    ],
)
def test_a_sample_with_other_arrays_is_named(other, expected):
    source = opened(Samples(5, other))
    with pytest.raises(InputError) as caught:
        source.train[5]
    assert caught.value.problems == (f"{NAME}: {expected}. All samples have the same arrays",)


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        (0, 3_000_000_000, "y has 3000000000, which does not fit in int32"),
        (0, [2**40 + 3], None),
        (np.int8(1), np.int64(1000), "y has 1000, which does not fit in int8"),
        (np.uint64(1), np.uint64(2**63 + 1), "y has 9223372036854775809, which does not fit in uint32"),
        (np.int64([1, 2]), np.int64([-5, -(2**31) - 1]), "y has -2147483649, which does not fit in int32"),
        (1.0, 1e300, "y has 1e+300, which does not fit in float32"),
        (np.float16(1), np.float32(1e5), "y has 100000.0, which does not fit in float16"),
        (0, -(2**31), -(2**31)),
        (np.int8(1), np.int64(-128), -128),
        (1.0, np.inf, np.inf),
        (1.0, 3_000_000_000, np.float32(3_000_000_000)),
    ],
)
def test_a_number_that_does_not_fit_is_named(first, other, expected):
    samples = [{"y": first}, {"y": other}]
    if expected is not None and not isinstance(expected, str):
        assert opened(samples).train[1]["y"] == expected
        return
    with pytest.raises(InputError) as caught:
        opened(samples)
    assert caught.value.problems[0].startswith(f"{NAME}: sample 1: {expected or 'y is int64[1], and int32[] in the first one'}")


def test_the_first_sample_must_fit_too():
    with pytest.raises(InputError, match="sample 0: y has 3000000000, which does not fit in int32"):
        opened([{"y": 3_000_000_000}]).train[0]
    with pytest.raises(InputError, match="sample 0: y failed: ValueError: setting an array element with a sequence"):
        opened([{"y": [1, [2, 3]]}])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (iter([]), "has no samples"),
        ("text", "returned a value of type str. Return samples with a length and an index"),
        ({"x": np.zeros(4), "y": np.zeros(3)}, "len() failed: ValueError: the arrays have different numbers of samples: {'x': 4, 'y': 3}"),
        ({}, "has no samples"),
        (None, "returned None. Return samples"),
        (grain.MapDataset.range(3).to_iter_dataset(), "sample 0 is a value of type int. A sample is a dict of arrays by name"),
        ([], "has no samples"),
        ([np.zeros(2)], "sample 0 is a value of type ndarray. A sample is a dict of arrays by name"),
        ([{"x": "text"}], "sample 0: x is a value of type str, not an array of numbers"),
    ],
)
def test_what_is_not_samples_is_refused_with_a_remedy(made, expected):
    with pytest.raises(InputError) as caught:
        opened(made)
    assert caught.value.problems[0].startswith(f"{NAME}: {expected}")


def test_a_dict_of_arrays_has_a_row_for_each_sample():
    source = opened(({"x": np.arange(8).reshape(4, 2), "y": [0, 1, 2, 3]}, {"x": np.zeros((1, 2), int), "y": [7]}))
    assert len(source.train) == 4 and source.held_out is not None and len(source.held_out) == 1
    batch = source.stack([source.train[3], source.train[1]])
    np.testing.assert_array_equal(batch["x"], [[6, 7], [2, 3]])
    np.testing.assert_array_equal(batch["y"], [3, 1])


def test_a_dataset_of_grain_keeps_its_order():
    dataset = grain.MapDataset.source([{"x": n} for n in range(8)]).shuffle(seed=3)
    source = opened(dataset)
    assert [int(source.train[n]["x"]) for n in range(8)] == [int(dataset[n]["x"]) for n in range(8)]
    assert len(source.train) == 8
