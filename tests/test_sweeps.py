"""The layouts, batches and best rows that the scaling and MFU benchmarks choose."""

import math

import pytest

from benchmarks import mfu, scaling


@pytest.mark.parametrize("model", scaling.SMALLEST)
@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_a_layout_uses_every_gpu_and_splits_the_batch_evenly(model, kind):
    for size in (size for size in scaling.POWERS if size >= scaling.SMALLEST[model]):
        sizes = scaling.layout(model, kind, size)
        shards = sizes["data"] * sizes["fsdp"]
        assert shards * sizes["tensor"] == size
        assert sizes["tensor"] <= scaling.HOST
        assert sizes["batch"] == shards * sizes["accumulate"]
        assert kind == "weak" or sizes["batch"] == scaling.GLOBAL_BATCH


def test_the_largest_batch_by_the_memory_of_one_and_two_sequences():
    assert mfu.largest_batch(10.0, 12.0, 8 + 2 * 5) == 4
    assert mfu.largest_batch(10.0, 12.0, 9.0) is None


def test_the_best_is_the_fastest_of_its_size_and_sequence():
    rows = [
        {"size": size, "seq": 1, "remat": remat, "tokens_per_s": {"median": speed}}
        for size, remat, speed in [("a", "none", 1), ("a", "block", 2), ("b", "none", 3)]
    ]
    rows.append({"size": "a", "seq": 1, "remat": "attention", "failed": "out of memory"})
    assert [(row["size"], row["remat"]) for row in mfu.best(rows)] == [("a", "block"), ("b", "none")]


def test_sizes_are_what_they_are_called():
    for name, size in mfu.SIZES.items():
        width, ffn = size["embed"], size["ffn"]
        parameters = size["layers"] * (4 * width**2 + 3 * width * ffn) + 2 * 32_000 * width
        assert math.isclose(parameters / 1e9, float(name.removesuffix("b")), rel_tol=0.06)
