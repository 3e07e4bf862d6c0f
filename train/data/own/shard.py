"""A stream of the user's: samples that have an iterator and no index, and the position in one shard of it.

    def texts(shard: int, shards: int):              # called once by each process, with its shard
        return (sample_of(line) for file in files[shard::shards] for line in open(file))

A run has to come back to its place in a stream after it was killed. What the function returns may say where it is and go there: by
`state_dict` and `load_state_dict`, as PyTorch and Hugging Face name them, or by `get_state` and `set_state`, as Grain does. Otherwise the
stream is read again up to the place, which takes long but needs nothing.

With a shuffle buffer, the samples of each block are given in a random order. While a block is given, the next one is read, one sample for
each that is given, so that no step waits for a whole block. A position in a block is the one at which the block begins, and the number of
samples of it that were given: a few numbers say what the buffer contained, and a run that resumes reads the block once more.

The invariant: from one position follow the same samples, whenever and wherever the shard is opened there.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jgt.document import InputError

from ...settings.code.names import FAILURES
from .samples import END, Sample, SampleError, SampleShapes, asked, checked, named, shapes_of

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_KINDS = "Make it of dicts, lists, tuples, numbers, text, bytes and arrays of numpy"


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """A place in a shard: after so many samples of an epoch, and so many more that were given of the block that begins there.

    state: the state of the stream after the samples of the epoch, as `encoded` makes it; None without one.
    """

    epoch: int = 0
    samples: int = 0
    given: int = 0
    state: Any = None

    def __post_init__(self) -> None:
        if any(type(number) is not int or number < 0 for number in (self.epoch, self.samples, self.given)):
            raise ValueError("a number of it is not a whole number from 0")


class StreamSource:
    """A function that returns streams. call(shard, shards, epoch): calls it. where: for messages. made: its stream of the first epoch.

    first: the first sample. element: the arrays of all. has_state: whether a stream can say where it is. is_sharded: whether a call returns
    a shard, and not the whole stream. drawn(number, sample): the sample that the run trains on as its number `number`. Raises InputError.
    """

    def __init__(self, call: Callable[[int, int, int], object], where: str, made: object, *, is_sharded: bool = False):
        self._call, self.where, self.is_sharded, self._last = call, where, is_sharded, None
        self.drawn: Callable[[int, Sample], Sample] = lambda number, sample: sample
        begin = Pass(self._new(made, 0), where)
        if (first := begin.next("sample 0")) is END:
            raise InputError([f"{where}: has no samples"])
        self.element: SampleShapes = shapes_of(first, where)
        self.first = checked(first, self.element, where, "sample 0")
        self.has_state = begin.has_state
        # A state that cannot be stored and loaded is wrong input now, and not when a restart needs it.
        if (state := begin.state()) is not None:
            with contextlib.suppress(InputError):
                made = self._call(0, 1, 0)
            # What several calls share would begin there in the run, too.
            if made is not self._last:
                Pass(made, where, state).close()
        begin.close()

    def first_again(self) -> Sample:
        """The first sample of the stream when it is opened once more; `first` where that cannot be done."""
        with contextlib.suppress(InputError), contextlib.closing(self.open(0, 1, 0, None)) as again:
            return checked(again.next("sample 0"), self.element, self.where, "sample 0")
        return self.first

    def open(self, shard: int, shards: int, epoch: int, state: object) -> Pass:
        """One epoch of a shard."""
        return Pass(self._new(self._call(shard, shards, epoch), epoch), self.where, state)

    def _new(self, made: object, epoch: int) -> object:
        if not hasattr(made, "__iter__"):
            raise InputError([f"{self.where}: returned {named(made)} for epoch {epoch}, and a stream at first"])
        if made is self._last and hasattr(made, "__next__"):
            raise InputError([f"{self.where}: returned the same iterator a second time, which begins where it was left. Return a new one"])
        self._last = made
        # Datasets of Hugging Face shuffle by it, and begin anew.
        if callable(set_epoch := getattr(made, "set_epoch", None)):
            asked(self.where, "set_epoch", lambda: set_epoch(epoch))
        return made


class Pass:
    """Reads once what the function has returned, from its beginning or from a state."""

    def __init__(self, made: Any, where: str, state: object = None):
        self._where = where
        methods = _methods(made)
        if methods and state is not None:
            # The iterator of a dataset begins at the state of the dataset.
            asked(where, methods[1].__name__, lambda: methods[1](decoded(state)))
            state = None
        self._iterator = asked(where, "iter()", lambda: iter(made))
        self._methods = methods or _methods(self._iterator)
        if self._methods and state is not None:
            load = self._methods[1]
            asked(where, load.__name__, lambda: load(decoded(state)))

    @property
    def has_state(self) -> bool:
        """Whether it can say where it is."""
        return self._methods is not None

    def state(self) -> object:
        """Where it is, encoded; None if it cannot say."""
        if self._methods is None:
            return None
        save = self._methods[0]
        state = asked(self._where, save.__name__, save)
        try:
            # As a checkpoint has it, which is text.
            return json.loads(json.dumps(encoded(state)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError([f"{self._where}: {save.__name__}() returned a state that cannot be stored: {error}. {_KINDS}"]) from None

    def next(self, what: str) -> object:
        """The next sample, or END. what: names it. Raises SampleError."""
        return asked(self._where, what, lambda: next(self._iterator, END))

    def close(self) -> None:
        """Ends what the iterator does in the background."""
        with contextlib.suppress(*FAILURES):
            getattr(self._iterator, "close", lambda: None)()


class Shard:
    """The samples of a shard, epoch after epoch, from a position on. buffer: the samples that are shuffled together; 0: none.

    Raises SampleError and InputError. read_again: the samples that were read only to come to the position.
    """

    def __init__(
        self, source: StreamSource, shard: int = 0, shards: int = 1, begin: ShardPosition | None = None, *, buffer: int = 0, seed: int = 0
    ):
        self._source, self._shard, self._shards, self._buffer, self._seed = source, shard, shards, buffer, seed
        self._of = f" of shard {shard} of {shards}" if source.is_sharded else ""
        begin = begin or ShardPosition()
        self.read_again = 0
        self._order, self._block, self._given = np.zeros(0, int), list[Any](), 0
        self._ahead, self._is_whole = list[Any](), False
        self._block_begin = self._ahead_begin = begin
        self._enter(replace(begin, given=0))
        self.skip(begin.given)

    def take(self) -> Sample:
        """The next sample. There is always one."""
        if not self._buffer:
            while (sample := self._read()) is None:
                pass
            return sample
        if self._given == len(self._order):
            self._next_block()
        self._read_ahead()
        index = self._order[self._given]
        sample, self._block[index] = self._block[index], None
        self._given += 1
        return sample

    def skip(self, count: int) -> None:
        """Reads samples that are not needed."""
        for _ in range(count):
            self.take()
        self.read_again += count

    def position(self) -> ShardPosition:
        """Where the next sample is."""
        return self._here() if not self._buffer else replace(self._block_begin, given=self._given)

    def close(self) -> None:
        """Ends what the stream does in the background."""
        self._pass.close()

    def _next_block(self) -> None:
        while not self._is_whole:
            self._read_ahead()
        self._block, begin = self._ahead, self._ahead_begin
        self._block_begin, self._given, self._ahead, self._is_whole = begin, 0, list[Any](), False
        self._order = np.random.default_rng([self._seed, self._shard, begin.epoch, begin.samples]).permutation(len(self._block))

    def _read_ahead(self) -> None:
        """Reads a sample of the next block, unless it has all: it ends with the buffer's size, or with the epoch."""
        if self._is_whole:
            return
        if not self._ahead:
            self._ahead_begin = self._here()
        sample = self._read()
        if sample is not None:
            self._ahead.append(sample)
        self._is_whole = len(self._ahead) == self._buffer or (sample is None and bool(self._ahead))

    def _read(self) -> Sample | None:
        """The next sample of the stream; None once at the end of an epoch."""
        if self._has_ended:
            self._enter(ShardPosition(epoch=self._epoch + 1))
        what = f"sample {self._count}{self._of}" + (f" of epoch {self._epoch}" if self._epoch else "")
        sample = self._pass.next(what)
        if sample is END:
            if not self._count:
                raise SampleError(f"{self._source.where}: {self._empty()}")
            self._pass.close()
            self._has_ended, self._known = True, ShardPosition(epoch=self._epoch + 1)
            return None
        self._count, self._known = self._count + 1, None
        return checked(sample, self._source.element, self._source.where, what)

    def _empty(self) -> str:
        if self._epoch:
            return f"epoch {self._epoch}{self._of} has no samples. Each call must return a stream that begins again"
        remedy = "Give it as many files as there are processes, or remove the argument shard: then each process reads the whole stream"
        return f"shard {self._shard} of {self._shards} has no samples. {remedy}"

    def _here(self) -> ShardPosition:
        """The position of the stream itself, in front of the buffer."""
        if self._known is None:
            self._known = ShardPosition(epoch=self._epoch, samples=self._count, state=self._pass.state())
        return self._known

    def _enter(self, begin: ShardPosition) -> None:
        """Opens an epoch of the stream at a position."""
        self._epoch, self._count, self._has_ended, self._known = begin.epoch, begin.samples, False, begin
        self._pass = self._source.open(self._shard, self._shards, begin.epoch, begin.state)
        if begin.state is not None and self._pass.has_state:
            return
        for number in range(begin.samples):
            if self._pass.next(f"sample {number}{self._of}") is END:
                before = f"the run has read {begin.samples} samples of epoch {begin.epoch}{self._of}"
                raise SampleError(f"{self._source.where}: {before}, and now there are only {number}")
        self.read_again += begin.samples


def _methods(made: object) -> tuple[Callable[[], object], Callable[[object], object]] | None:
    """How a stream says where it is, and how it goes there."""
    for names in _METHODS:
        save, load = (getattr(made, name, None) for name in names)
        if callable(save) and callable(load):
            return save, load
    return None


def encoded(state: Any) -> object:
    """A state as JSON has it. A copy: what the stream does with the state later does not change it. Raises TypeError."""
    if state is None or type(state) in (bool, str, int, float):
        return state
    if isinstance(state, dict):
        return {"dict": [[encoded(key), encoded(value)] for key, value in state.items()]}
    if type(state) in (tuple, list):
        return {"tuple" if isinstance(state, tuple) else "list": [encoded(value) for value in state]}
    if type(state) is bytes:
        return {"bytes": base64.b64encode(state).decode()}
    # Neither a subclass, such as an array with a mask, nor a type that its text does not name: records, and those of ml_dtypes.
    is_plain = type(state) is np.ndarray or isinstance(state, np.generic)
    if is_plain and not state.dtype.hasobject and np.dtype(state.dtype.str) == state.dtype:
        return {
            "array": base64.b64encode(np.ascontiguousarray(state).tobytes()).decode(),
            "dtype": state.dtype.str,
            "shape": list(state.shape),
        }
    raise TypeError(f"it has a value of type {type(state).__name__}" + (f" of {state.dtype}" if hasattr(state, "dtype") else ""))


def decoded(value: Any) -> Any:
    """A state, from what `encoded` has made of it."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return np.frombuffer(base64.b64decode(value["array"]), value["dtype"]).reshape(value["shape"]).copy()[()]
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decoded(key): decoded(inner) for key, inner in content}
    if kind == "bytes":
        return base64.b64decode(content)
    return tuple(map(decoded, content)) if kind == "tuple" else [decoded(inner) for inner in content]
