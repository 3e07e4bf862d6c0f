"""Order, resumption, rows of several processes and held-out windows, compared with a slow version of the definition."""

import threading
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgt.document import InputError
from train.data.config import DataConfig, MixturePart
from train.data.opening import open_data
from train.data.stream import Segment, Stream, Windows, num_windows

SEQ = 5
NUM_TOKENS = 1003


@pytest.fixture
def token_file(tmp_path):
    """A file in which token i is i, so that a window shows where it comes from."""
    path = tmp_path / "tokens.bin"
    np.arange(NUM_TOKENS, dtype=np.uint16).tofile(path)
    return str(path)


@pytest.fixture
def opened(tmp_path, token_file):
    def _open(seed=1, seq=SEQ, **keys):
        keys = {"source": "tokens", "path": token_file, "eval_tokens": 203, **keys}
        return open_data(DataConfig(**keys), seq=seq, vocab=NUM_TOKENS, seed=seed, cache_dir=tmp_path)

    return _open


def starts(data, num_samples, start=0):
    """The first tokens of the samples from `start` on."""
    return [int(batch["inputs"][0, 0]) for batch in data.train_batches(start, 1, [0], num_samples)]


def stacked(batches):
    batches = list(batches)
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


# -- windows -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 9), st.integers(0, 60))
def test_windows_tile_the_stream(sizes, seq, cut):
    tokens = np.arange(sum(sizes), dtype=np.int64)
    pieces = np.split(tokens, np.cumsum(sizes))[: len(sizes)]
    stream = Stream(tuple(Segment(name=str(i), tokens=piece) for i, piece in enumerate(pieces)))
    windows = Windows(stream=stream, seq=seq, vocab=256)
    expected = [tokens[start : start + seq + 1] for start in range(0, len(tokens), seq) if start + seq + 1 <= len(tokens)]
    assert len(windows) == num_windows(len(stream), seq) == len(expected)
    for index, window in enumerate(expected):
        np.testing.assert_array_equal(windows[index], window)
    before, after = stream.split(cut)
    assert before.read(0, len(before)).tolist() == tokens[:cut].tolist()
    assert after.read(0, len(after)).tolist() == tokens[cut:].tolist()


# -- training ----------------------------------------------------------------------------------------------------


def test_a_batch(opened):
    (batch,) = opened(shuffle=False).train_batches(3, 2, [0, 1], 1)
    first = np.arange(15, 25).reshape(2, 5)
    np.testing.assert_array_equal(batch["inputs"], first)
    np.testing.assert_array_equal(batch["targets"], first + 1)
    np.testing.assert_array_equal(batch["weights"], np.ones((2, 5)))
    assert {key: value.dtype for key, value in batch.items()} == {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    assert all(value.flags.c_contiguous for value in batch.values())


def test_an_epoch_visits_every_training_window_once_and_the_next_in_another_order(opened):
    data = opened()
    num_windows_ = (NUM_TOKENS - 203 - 1) // SEQ
    epochs = np.array(starts(data, 3 * num_windows_)).reshape(3, num_windows_)
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, num_windows_ * SEQ, SEQ))
    assert not any((first == second).all() for first, second in pairwise(epochs))
    assert starts(opened(shuffle=False), 2 * num_windows_) == 2 * list(range(0, num_windows_ * SEQ, SEQ))


def test_the_order_follows_the_seed_alone(opened):
    first = starts(opened(seed=1), 400)
    assert starts(opened(seed=1), 400) == first
    assert starts(opened(seed=2), 400) != first
    # The second epoch of a seed is not the first of its successor.
    num_windows_ = (NUM_TOKENS - 203 - 1) // SEQ
    assert starts(opened(seed=2), 50) != first[num_windows_ : num_windows_ + 50]


@pytest.mark.parametrize("skipped", [1, 5, 60])
def test_resuming_equals_skipping(opened, skipped):
    data = opened()
    whole = stacked(islice(data.train_batches(0, 4, range(4)), skipped, skipped + 7))
    resumed = stacked(data.train_batches(skipped * 4, 4, range(4), 7))
    for key, value in whole.items():
        np.testing.assert_array_equal(resumed[key], value)


def test_the_batch_size_does_not_change_the_order_of_samples(opened):
    data = opened()
    by_four = stacked(data.train_batches(0, 4, range(4), 15))
    by_six = stacked(data.train_batches(0, 6, range(6), 10))
    np.testing.assert_array_equal(by_four["inputs"], by_six["inputs"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_processes_together_read_the_whole_batch(opened, split):
    data = opened()

    def batches(rows):
        return list(data.train_batches(8, 6, rows, 9) if split == "train" else data.eval_batches(6, rows))

    whole, even, odd = batches(range(6)), batches([0, 2, 4]), batches([5, 3, 1])
    for batch, ours, theirs in zip(whole, even, odd, strict=True):
        for key, value in batch.items():
            np.testing.assert_array_equal(ours[key], value[[0, 2, 4]])
            np.testing.assert_array_equal(theirs[key], value[[5, 3, 1]])


def test_rows_outside_the_batch_are_refused(opened):
    with pytest.raises(ValueError, match=r"rows \[0, 4\] are not all rows of a batch of 4"):
        opened().train_batches(0, 4, [0, 4])
    with pytest.raises(ValueError, match="rows"):
        opened().eval_batches(4, [-1])


def test_leaving_the_loop_ends_the_threads(opened):
    before = set(threading.enumerate())
    batches = opened().train_batches(0, 2, [0, 1])
    next(batches)
    new = set(threading.enumerate()) - before
    assert new
    batches.close()
    for thread in new:
        thread.join(timeout=10)
        assert not thread.is_alive()


# -- evaluation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 40, 64])
def test_evaluation_covers_each_held_out_token_once(opened, batch):
    data = opened()
    seen = stacked(data.eval_batches(batch, range(batch)))
    num_windows_ = (203 - 1) // SEQ
    assert len(data.eval_parts) == 1
    assert data.eval_sequences == num_windows_ == 40
    assert len(seen["weights"]) % batch == 0
    first = NUM_TOKENS - 203
    targets = seen["targets"][seen["weights"] == 1.0]
    assert targets.tolist() == list(range(first + 1, first + 1 + num_windows_ * SEQ))
    assert set(np.unique(seen["weights"])) <= {0.0, 1.0}
    assert not seen["inputs"][seen["weights"] == 0.0].any()


def test_evaluation_can_be_shortened(opened):
    data = opened()
    assert len(list(data.eval_batches(8, range(8), 3))) == 3
    assert len(list(data.eval_batches(8, range(8), 99))) == 5
    assert list(data.eval_batches(8, range(8), 0)) == []


def test_training_and_evaluation_share_no_token(opened):
    data = opened()
    trained = {int(t) for b in data.train_batches(0, 40, range(40), 10) for key in ("inputs", "targets") for t in b[key].ravel()}
    held_out = {int(t) for b in data.eval_batches(40, range(40)) for key in ("inputs", "targets") for t in b[key].ravel()}
    assert trained == set(range(NUM_TOKENS - 203 - 4))
    assert not trained & held_out


def test_no_evaluation(opened):
    data = opened(eval_tokens=0)
    assert data.eval_parts == ()
    assert data.eval_sequences == 0
    assert list(data.eval_batches(4, range(4))) == []
    assert data.fingerprint["train_tokens"] == NUM_TOKENS


def test_held_out_data_of_its_own(opened, tmp_path):
    np.arange(500, 521, dtype=np.uint16).tofile(tmp_path / "held.bin")
    data = opened(eval_path=str(tmp_path / "held.bin"))
    (batch,) = data.eval_batches(4, range(4))
    assert batch["targets"].ravel().tolist() == list(range(501, 521))
    assert (data.fingerprint["train_tokens"], data.fingerprint["eval_tokens"]) == (NUM_TOKENS, 21)


@pytest.mark.parametrize(
    ("seq", "eval_tokens", "expected"),
    [
        (1200, 500, "{path} has 1,003 tokens, but one window of seq 1200 needs 1,201. Give more data, or lower model.seq"),
        (
            600,
            500,
            "500 of the 1,003 tokens of {path} cannot be held out: one window of seq 600 needs 601, to train on",
        ),
        (
            5,
            5,
            "5 of the 1,003 tokens of {path} cannot be held out: one window of seq 5 needs 6. Set data.eval_tokens to a number",
        ),
        (5, 1000, "1,000 of the 1,003 tokens of {path} cannot be held out: one window of seq 5 needs 6. Set"),
        (5, 500_000, "500,000 of the 1,003 tokens of {path} cannot be held out"),
        (5, 999, "to a number from 6 to 997, or to 0 for no evaluation, or remove the key, which holds out 50"),
    ],
)
def test_a_split_without_a_window_has_one_remedy(opened, token_file, seq, eval_tokens, expected):
    with pytest.raises(InputError) as caught:
        opened(seq=seq, eval_tokens=eval_tokens)
    (problem,) = caught.value.problems
    assert expected.format(path=token_file) in problem


@pytest.mark.parametrize(("seq", "held_out"), [(5, 50), (49, 50), (60, 61), (500, 501), (501, 0), (1002, 0)])
def test_without_a_number_a_share_is_held_out(opened, seq, held_out):
    data = opened(seq=seq, eval_tokens=None)
    assert (data.fingerprint["train_tokens"], data.fingerprint["eval_tokens"]) == (NUM_TOKENS - held_out, held_out)
    assert bool(data.eval_parts) == (held_out > 0)
    assert len(list(data.train_batches(0, 2, range(2), 1))) == 1


def test_one_window_is_enough(opened):
    assert starts(opened(seq=NUM_TOKENS - 1, eval_tokens=0), 3) == [0, 0, 0]


# -- mixtures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(opened, tmp_path):
    parts = []
    for index, weight in enumerate([1.0, 2.0, 0.5]):
        path = tmp_path / f"part{index}.bin"
        np.full(400, index, np.uint16).tofile(path)
        parts.append(MixturePart(weight=weight, source="tokens", path=str(path)))
    return opened(source="mixture", path=None, mixture=tuple(parts), eval_tokens=100)


def test_a_mixture_keeps_its_proportions_all_along(mixed):
    parts = np.array(starts(mixed, 700))
    for prefix in (70, 350, 700):
        counts = np.bincount(parts[:prefix], minlength=3)
        np.testing.assert_allclose(counts, np.array([2, 4, 1]) * prefix / 7, atol=1.5)


def test_a_mixture_resumes_and_evaluates_part_after_part(mixed):
    assert starts(mixed, 20, start=33) == starts(mixed, 53)[33:]
    seen = stacked(mixed.eval_batches(4, range(4)))
    per_part = (100 - 1) // SEQ
    assert mixed.eval_sequences == 3 * per_part
    assert seen["inputs"][seen["weights"] == 1.0].tolist() == [part for part in range(3) for _ in range(per_part * SEQ)]
    assert (mixed.fingerprint["train_tokens"], mixed.fingerprint["eval_tokens"]) == (900, 300)
    assert mixed.eval_parts == ("part0", "part1", "part2")
    for index, part in enumerate(mixed.eval_parts):
        batches = list(mixed.eval_batches(4, range(4), 2, part=part))
        assert len(batches) == 2
        assert all((batch["inputs"] == index)[batch["weights"] == 1.0].all() for batch in batches)
    assert mixed.fingerprint["mixture[1].bytes"] == 800


def test_a_mixture_lists_the_problems_of_every_part(opened, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(b"odd")
    parts = tuple(MixturePart(weight=1.0, source="tokens", path=str(tmp_path / f"{name}.bin")) for name in "ab")
    with pytest.raises(InputError) as caught:
        opened(source="mixture", path=None, mixture=parts)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [part.path for part in parts]


def test_one_vocabulary_would_do_for_all_parts(opened, tmp_path):
    parts = []
    for name, largest in (("a", 2000), ("b", 3000)):
        np.arange(largest, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
        parts.append(MixturePart(weight=1.0, source="tokens", path=str(tmp_path / f"{name}.bin")))
    with pytest.raises(InputError) as caught:
        opened(source="mixture", path=None, mixture=tuple(parts))
    assert ["Set model.vocab=3000, or" in problem for problem in caught.value.problems] == [True, True]


def test_a_missing_file_is_an_input_error(opened):
    with pytest.raises(InputError, match=r"data\.path: no such file or folder: absent"):
        opened(path="absent")
