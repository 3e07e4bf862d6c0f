"""Random changes of samples: exact with a key, on every number of processes; recognised and said without one."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from jgt.document import InputError
from train.data.config import OwnData
from train.data.opening import open_own_data
from train.data.own import open_own
from train.data.own.samples import SampleError
from train.settings.code.files import Code

COUNT, BATCH = 12, 4


def plain(count=COUNT):
    return [{"x": np.full(3, i, np.float32), "id": np.int32(i)} for i in range(count)]


def stream():
    yield from plain()


def noise(sample, rng):
    return {**sample, "x": sample["x"] + rng.random(3, np.float32), "draw": np.float32(rng.random())}


def opened(made, transform=noise, seed=0, processes=1, **keys):
    source = made if callable(made) else lambda: made
    code = Code(objects={"data.source": source} | ({} if transform is None else {"data.transform": transform}))
    config = OwnData(source="mine:data", transform=None if transform is None else "mine:flip", **keys)
    own = open_own(config, code, lambda key: "run.yaml:2", seq=1, vocab=1, seed=seed)
    return open_own_data(own, config, seed=seed, processes=processes)


def taken(data, count, start=0, rows=range(BATCH), batch=BATCH):
    read = itertools.islice(data.train_batches(start, batch, rows), count)
    return [tuple(np.concatenate([batch[name].reshape(len(rows), -1) for name in ("id", "x", "draw")], axis=1)) for batch in read]


def flat(batches):
    return np.array([row for batch in batches for row in batch])


# -- with a key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [plain(), stream], ids=["indexed", "stream"])
def test_draws_are_the_same_after_a_resume_with_another_batch_and_on_all_processes(made):
    whole = flat(taken(opened(made), 9))
    # Three epochs: no draw is made twice, and each is that of the sample's number.
    assert len({tuple(row) for row in whole}) == len(whole) == 36
    expected = [np.random.default_rng((0, n)).random(3, np.float32) for n in range(36)]
    np.testing.assert_array_equal(whole[:, 1:4], whole[:, :1].astype(np.float32) + np.array(expected))
    resumed = opened(made)
    resumed.restore(0, ())
    np.testing.assert_array_equal(flat(taken(resumed, 4, start=20)), whole[20:])
    np.testing.assert_array_equal(flat(taken(opened(made), 6, batch=6, rows=range(6))), whole)
    for processes in (2, 4):
        share = BATCH // processes
        parts = [taken(opened(made, processes=processes), 9, rows=range(p * share, (p + 1) * share)) for p in range(processes)]
        np.testing.assert_array_equal(np.array([row for batch in zip(*parts, strict=True) for part in batch for row in part]), whole)


def test_another_seed_draws_otherwise():
    first, second = (flat(taken(opened(plain(), seed=seed, shuffle=False), 3)) for seed in (0, 1))
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    assert (first[:, 4] != second[:, 4]).all()


def test_held_out_samples_are_not_changed_and_have_the_arrays_of_changed_ones():
    held = [{**sample, "draw": np.float32(7)} for sample in plain(4)]
    (batch,) = opened((plain(), held)).eval_batches(4, range(4))
    np.testing.assert_array_equal(batch["x"], [[i] * 3 for i in range(4)])
    with pytest.raises(InputError, match=r"data.source: mine:data \(eval\): sample 0 has \['id', 'x'\], and the first one has"):
        list(opened((plain(), plain(4))).eval_batches(4, range(4)))


def failing(sample, rng):
    if sample["id"] == 5:
        raise ValueError("too dark")
    return sample


def test_a_transform_that_fails_is_named_with_its_line():
    with pytest.raises((InputError, SampleError)) as caught:
        taken(opened(plain(), failing, shuffle=False), 3)
    line = failing.__code__.co_firstlineno + 2
    assert str(caught.value) == f"run.yaml:2: data.transform: mine:flip: sample 5 failed: {__file__}:{line}: ValueError: too dark"
    with pytest.raises(InputError, match=r"data.transform: mine:flip: sample 0 is None. A sample is a dict of arrays by name"):
        opened(plain(), lambda sample, rng: None)


def test_keys_that_name_no_function_are_refused():
    assert list(OwnData(source="mine:data", transform="flip").problems()) == [
        ("transform", "'flip' is not MODULE:NAME of a function transform(sample, rng) (docs/own.md)")
    ]


# -- without one ---------------------------------------------------------------------------------------------------


class Drawing:
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"x": np.full(3, index + self.draw(), np.float32), "id": np.int32(index)}


OWN_GENERATOR = np.random.default_rng(0)
DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "rare": lambda: float(np.random.rand() < 1e-9),
    "a generator of its own": OWN_GENERATOR.random,
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("form", ["samples", "transform", "stream"])
def test_samples_that_draw_from_generators_without_a_key_are_said_and_have_no_checksum_of_values(kind, form):
    draw = DRAWS[kind]

    def changed(sample, rng):
        return {**sample, "x": sample["x"] + np.float32(draw())}

    def drawn():
        yield from Drawing(draw)

    made, transform = {"samples": (Drawing(draw), None), "transform": (plain(), changed), "stream": (drawn, None)}[form]
    first, again = (opened(made, transform) for _ in range(2))
    if form == "stream" and kind == "a generator of its own":
        # It is not opened twice to find out.
        assert first.is_repeatable
        return
    assert first.fingerprint == again.fingerprint and first.fingerprint["random"] == "yes"
    assert not first.is_repeatable
    place = {
        "samples": f"{__file__}:{Drawing.__getitem__.__code__.co_firstlineno}",
        "stream": f"{__file__}:{drawn.__code__.co_firstlineno}",
    }
    said = f"mine:data: {place.get(form, __file__)}"
    assert any(note.startswith(said) and "The run does not repeat these draws" in note for note in first.notes)


def test_samples_that_draw_by_their_index_or_set_a_seed_are_repeatable():
    def seeded():
        random.seed(3)
        return random.random()

    class ByIndex(Drawing):
        def __getitem__(self, index):
            self.draw = np.random.default_rng(index).random
            return super().__getitem__(index)

    for made in (ByIndex(None), Drawing(seeded), plain()):
        data = opened(made, None)
        assert data.is_repeatable and not data.notes and "random" not in data.fingerprint
    assert opened(plain(), None).fingerprint != opened(plain(COUNT - 1), None).fingerprint


def test_held_out_samples_that_are_drawn_are_said_too():
    data = opened((plain(), Drawing(random.random)), None)
    assert data.fingerprint["eval_random"] == "yes" and "random" not in data.fingerprint and data.notes
    assert Path(__file__).name in data.notes[0]
