"""Streams of the user's own: the same samples after a resume and on any number of processes, and what is refused."""

import collections
import itertools
import json
import random
from collections import Counter

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from jgt.document import InputError
from train.data.config import OwnData
from train.data.opening import open_own_data
from train.data.own import SampleError, open_own
from train.data.own.shard import decoded, encoded
from train.settings.code.files import Code

NAME = "run.yaml:2: data.source: mine:data"
COUNT, BATCH = 48, 8
"""The samples of an epoch, which is several batches long."""


def sample(number, value=0.0):
    return {"id": np.int32(number), "value": np.float32(value)}


def generator(shard, shards, epoch):
    return (sample(number, epoch) for number in range(shard, COUNT, shards))


def whole():
    return (sample(number) for number in range(COUNT))


class Counting:
    """An iterator whose state is its own dict, which changes with each sample."""

    def __init__(self, shard, shards):
        self.next, self.step, self.random = shard, shards, np.random.default_rng(shard)

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= COUNT:
            raise StopIteration
        self.next += self.step
        return sample(self.next - self.step, self.random.random())

    def state_dict(self):
        return {"next": self.next, "random": self.random.bit_generator.state}

    def load_state_dict(self, state):
        self.next, self.random.bit_generator.state = state["next"], state["random"]


class TorchStyle:
    """A dataset that loads a state for its next iterator."""

    def __init__(self, shard, shards):
        self.numbers, self.begin, self.random = range(shard, COUNT, shards), 0, random.Random(7)

    def __iter__(self):
        self.at = self.begin
        for number in self.numbers[self.begin :]:
            self.at += 1
            yield sample(number, self.random.random())

    def state_dict(self):
        return {"at": self.at, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.begin = state["at"]
        self.random.setstate(state["random"])


def grains(shard, shards, epoch):
    return grain.MapDataset.range(shard, COUNT, shards).shuffle(seed=epoch).map(sample).to_iter_dataset()


STATEFUL = {"counting": Counting, "torch": TorchStyle, "grain": grains}
KINDS = {**STATEFUL, "generator": generator, "whole": whole}


def opened(function, processes=1, seed=0, **keys):
    config = OwnData(source="mine:data", **keys)
    source = open_own(config, Code(objects={"data.source": function}), lambda key: "run.yaml:2", seq=1, vocab=1)
    return open_own_data(source, config, seed=seed, processes=processes)


def taken(batches, count):
    return [(batch["id"].tolist(), batch["value"].tolist()) for batch in itertools.islice(batches, count)]


def ids(data, count, rows=range(BATCH), start=0):
    return [number for batch, _ in taken(data.train_batches(start, BATCH, rows), count) for number in batch]


def rows_of(process, processes):
    return range(process * BATCH // processes, (process + 1) * BATCH // processes)


Point = collections.namedtuple("Point", "x y")
ODD_STATES = [
    np.array([(1, 0.5)], dtype=[("i", "i4"), ("f", "f4")]),
    np.array([(1, 0.5)], dtype=[("i", "i4"), ("f", "f4")])[0],
    np.ones(3, jnp.bfloat16),
    jnp.bfloat16(1),
    np.ones(3, jnp.float8_e4m3fn),
    np.ma.masked_array([1, 2], mask=[True, False]),
    np.array([1, 2]).view(np.recarray),
    Point(1, 2),
    10**5000,
]


# -- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "buffer"), [("counting", 0), ("counting", 5), ("counting", 100), ("torch", 5), ("grain", 5), ("generator", 0), ("whole", 5)]
)
def test_a_stream_continues_bit_for_bit_wherever_it_was_stopped(kind, buffer, capsys):
    straight = taken(opened(KINDS[kind], shuffle_buffer=buffer).train_batches(0, BATCH, range(BATCH)), 16)
    last, at = opened(KINDS[kind], shuffle_buffer=buffer), 0
    for steps in (4, 2, 10):
        batches = last.train_batches(at * BATCH, BATCH, range(BATCH))
        assert taken(batches, steps) == straight[at : at + steps]
        at += steps
        # The thread has read further than the step.
        stored = last.stored(at * BATCH)
        last = opened(KINDS[kind], shuffle_buffer=buffer)
        last.restore(at * BATCH, [stored])
    says = "read again up to sample 32: 32 samples" in capsys.readouterr().err
    assert buffer or says == (kind not in STATEFUL)


def test_places_of_earlier_steps_are_still_known():
    """An update that ends the run is taken back, and --replay looks at two batches again."""
    data = opened(Counting)
    seen = taken(data.train_batches(0, BATCH, range(BATCH)), 5)
    again = opened(Counting)
    again.restore(2 * BATCH, [data.stored(2 * BATCH)])
    for start in (2, 2, 4):
        assert taken(again.train_batches(start * BATCH, BATCH, range(BATCH)), 1) == [seen[start]]


def test_the_thread_reads_a_few_batches_ahead_and_no_more():
    read = []

    def watched():
        return (read.append(number) or sample(number) for number in itertools.count())

    batches = opened(watched, shuffle_buffer=16).train_batches(0, BATCH, range(BATCH))
    assert len(taken(batches, 200)) == 200
    # One sample looked at when the data was opened, the buffer, and the batches that wait or are made.
    assert 200 * BATCH < len(read) <= 1 + 16 + 205 * BATCH


# -- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "buffer", "processes"),
    [(kind, 7, n) for kind in ("counting", "whole") for n in (1, 2, 4)] + [("grain", 0, 2), ("torch", 0, 4)],
)
def test_processes_together_see_each_sample_once_an_epoch(kind, buffer, processes):
    seen = [ids(opened(KINDS[kind], processes, shuffle_buffer=buffer), 12, rows_of(p, processes)) for p in range(processes)]
    for epoch in range(2):
        per_epoch = [numbers[epoch * COUNT // processes : (epoch + 1) * COUNT // processes] for numbers in seen]
        assert Counter(itertools.chain(*per_epoch)) == Counter(range(COUNT))


@pytest.mark.parametrize("later", [1, 4])
@pytest.mark.parametrize("kind", ["counting", "whole"])
def test_a_run_continues_with_the_same_batches_on_another_number_of_processes(kind, later):
    straight = [opened(KINDS[kind], 2, shuffle_buffer=5) for _ in range(2)]
    batches = [data.train_batches(0, BATCH, rows_of(p, 2)) for p, data in enumerate(straight)]
    for each in batches:
        taken(each, 4)
    stored = [data.stored(4 * BATCH) for data in straight]
    expected = np.concatenate([[batch for batch, _ in taken(each, 6)] for each in batches], axis=1)
    found = []
    for process in range(later):
        data = opened(KINDS[kind], later, shuffle_buffer=5)
        data.restore(4 * BATCH, stored)
        found.append([batch for batch, _ in taken(data.train_batches(4 * BATCH, BATCH, rows_of(process, later)), 6)])
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)


def test_rows_in_any_order_are_those_of_the_batch():
    all_rows = ids(opened(Counting, 4), 1)
    assert ids(opened(Counting, 4), 1, [6, 1]) == [all_rows[6], all_rows[1]]


# -- shuffling -----------------------------------------------------------------------------------------------------


def test_a_buffer_shuffles_each_block_anew_by_the_seed():
    orders = [ids(opened(whole, seed=seed, shuffle_buffer=20), 12) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and orders[0][:COUNT] != orders[0][COUNT:]
    for begin, end in ((0, 20), (20, 40), (40, 48)):
        assert sorted(orders[0][begin:end]) == [*range(begin, end)] != orders[0][begin:end]
    assert ids(opened(whole), 6) == [*range(COUNT)]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_stream_that_is_empty_is_an_error_and_not_an_endless_loop():
    def some(shard, shards, epoch):
        return (sample(number) for number in range(shard, 0 if epoch else 3, shards))

    with pytest.raises(InputError, match="mine:data: has no samples"):
        opened(lambda: iter([]))
    with pytest.raises(SampleError, match=r"shard 3 of 4 has no samples\. Give it as many files as there are processes"):
        ids(opened(some, 4), 1, rows_of(3, 4))
    with pytest.raises(SampleError, match=r"epoch 1 of shard 0 of 1 has no samples\. Each call must return a stream that begins again"):
        ids(opened(some), 1)


def test_an_iterator_that_is_used_already_is_refused():
    same = whole()
    with pytest.raises(InputError, match="returned the same iterator a second time"):
        ids(opened(lambda: same), 1)


def test_a_stream_without_a_state_is_refused_where_it_must_be_exact():
    with pytest.raises(InputError, match=r"data\.resume: exact needs a stream .*, and a value of type generator cannot\. Return"):
        opened(whole, resume="exact")
    assert not opened(Counting, resume="exact").notes and "stream without a state" in opened(whole).notes[0]


def test_a_state_that_the_stream_does_not_take_is_refused_at_the_start():
    class Odd(Counting):
        def load_state_dict(self, state):
            self.next = state["at"]

    with pytest.raises(InputError, match=r"load_state_dict failed: .*KeyError: 'at'"):
        opened(Odd)


def test_trying_a_state_moves_no_stream_that_calls_share():
    shared = TorchStyle(0, 1)
    assert ids(opened(lambda shard, shards: shared), 1) == [*range(BATCH)]


def test_a_state_that_cannot_be_stored_is_refused_at_the_start():
    class Odd(Counting):
        def state_dict(self):
            return {"random": self.random}

    with pytest.raises(InputError, match=r"state_dict\(\) returned a state that cannot be stored: it has a value of type Generator\."):
        opened(Odd)
    for odd in ODD_STATES:
        Odd.state_dict = lambda self, odd=odd: {"inner": [odd]}
        with pytest.raises(InputError, match=r"returned a state that cannot be stored: .*Make it of dicts, lists, tuples"):
            opened(Odd)


def test_a_buffer_is_for_streams():
    with pytest.raises(InputError, match=r"data\.shuffle_buffer: is for streams"):
        opened(lambda: [sample(0)], shuffle_buffer=4)
    assert [*OwnData(source="mine:data", shuffle=False, shuffle_buffer=4).problems()]


def test_a_sample_that_fails_is_named(monkeypatch):
    def failing(shard, shards):
        return (sample(1 / (n - 30)) if n > 20 else sample(n) for n in range(shard, COUNT, shards))

    with pytest.raises(SampleError, match=r"sample 15 of shard 0 of 2 failed: .*test_own_streams\.py:\d+: ZeroDivisionError"):
        ids(opened(failing, 2), 6)


def test_a_stream_that_has_become_shorter_is_an_error():
    data = opened(whole)
    data.restore(40, ['{"shards": 1, "positions": {"0": {"epoch": 0, "samples": 50, "given": 0, "state": null}}}'])
    with pytest.raises(SampleError, match="the run has read 50 samples of epoch 0, and now there are only 48"):
        data.train_batches(40, BATCH, range(BATCH))


@pytest.mark.parametrize("stored", ["{}", "[", '{"shards": 2, "positions": {}}', '{"shards": 1, "positions": {"0": {"epoch": -1}}}', "3"])
def test_a_place_that_cannot_be_read_is_wrong_input(stored):
    with pytest.raises(InputError, match="the checkpoint has no place of the stream that can be read"):
        opened(whole).restore(8, [stored])


def test_other_data_begins_at_its_beginning():
    data = opened(Counting)
    data.restore(3 * BATCH, [])
    assert ids(data, 1, start=3 * BATCH) == [*range(BATCH)]


def test_more_shards_than_rows_are_an_error():
    data = opened(generator)
    places = {str(shard): {"samples": 1} for shard in range(9)}
    data.restore(8, [str({"shards": 9, "positions": places}).replace("'", '"')])
    with pytest.raises(InputError, match="in 9 shards, more than the rows of a batch of 8"):
        data.train_batches(8, BATCH, range(BATCH))


# -- held-out streams ----------------------------------------------------------------------------------------------


def test_a_held_out_stream_is_read_once(monkeypatch):
    data = opened(lambda split: whole() if split == "train" else (sample(n) for n in range(20)))
    assert data.eval_sequences == 20 and data.train_sequences is None
    for _ in range(2):
        assert [batch["id"].tolist() for batch in data.eval_batches(10, range(10))] == [[*range(10)], [*range(10, 20)]]
    monkeypatch.setattr("train.data.own.samples._MOST_HELD_OUT", 100)
    with pytest.raises(InputError, match=r"mine:data \(eval\): the held-out samples have more than 100 bytes"):
        opened(lambda: (whole(), (sample(n) for n in itertools.count())))


# -- states --------------------------------------------------------------------------------------------------------


def test_states_are_stored_as_they_are():
    state = {
        "numbers": [1, 2.5, True, None, 1 << 100],
        3: (b"\0\xff", "text", ()),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float64(0.1),
        "random": np.random.default_rng(5).bit_generator.state,
        "python": random.Random(5).getstate(),
    }
    found = decoded(encoded(state))
    np.testing.assert_array_equal(found.pop("array"), state.pop("array"))
    assert found == state and type(found["scalar"]) is np.float64
    for odd in ({1, 2}, object(), np.array([object()])):
        with pytest.raises(TypeError, match="it has a value of type"):
            encoded([odd])


@pytest.mark.parametrize("dtype", ["?", "<u2", ">i4", "f2", ">f8", "c16", "U3", "S2", "M8[ns]", "m8[s]"])
def test_an_array_of_any_plain_type_is_stored_as_it_is(dtype):
    for array in (np.arange(6).astype(np.dtype(dtype)).reshape(2, 3).T, np.zeros((0, 2), dtype), np.ones((), dtype)[()]):
        found = decoded(json.loads(json.dumps(encoded([array]))))[0]
        assert type(found) is type(array) and found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
