"""A user's own data: a function that returns samples, which are dicts of arrays.

    def digits(split: str):                          # called once with "train" and once with "eval"
        images, labels = ...
        return [{"image": image, "label": label} for image, label in zip(images, labels)]

The samples are anything with a length and an index, a Grain MapDataset too, or a dict of arrays with a row for each sample: then sample i
of the order is the same on every number of processes, and a run resumes from the number of samples alone. Or they are a stream, which has
an iterator and no index (`shard.py`). A function without the argument `split` returns the training samples, or a pair with the held-out
ones.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jgt.document import InputError

from ...settings.code.files import Code
from ...settings.code.names import call_with, load_object
from ..config import OwnData
from .samples import IndexedSamples, Sample, SampleError, SampleShapes, held_out_samples, named, shapes_of
from .shard import Shard, StreamSource
from .shipped import function_of
from .transform import NOT_REPEATED, Transform, generators, line_of

_MOST_HASHED = 16
_REMEDY = "Return samples with a length and an index, such as a list of dicts or a dict of arrays, or a stream of dicts (docs/own.md)"
_STATEFUL = (
    "Return an iterator with state_dict() and load_state_dict(state), or with get_state() and set_state(state) (docs/own.md, Streams)"
)


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """Opened samples. element: the arrays of one sample. fingerprint: see `train.data.batches.Data`.

    transform: changes the training samples. notes: lines about the samples for the log of a run.
    """

    train: IndexedSamples | StreamSource
    held_out: IndexedSamples | None
    element: SampleShapes
    fingerprint: dict[str, str | int]
    transform: Transform | None = None
    notes: tuple[str, ...] = ()

    def drawn(self, number: int, sample: Sample) -> Sample:
        """The sample that the run trains on as its number `number`."""
        return sample if self.transform is None else self.transform(number, sample, self.element)

    def stack(self, samples: Sequence[Sample]) -> Sample:
        """The batch of some samples."""
        return {name: np.stack([sample[name] for sample in samples]) for name in self.element}

    def first(self, count: int) -> Sample:
        """A batch of the first samples, which begin anew where there are fewer."""
        if isinstance(self.train, StreamSource):
            shard = Shard(self.train)
            return self.stack([self.drawn(n, shard.take()) for n in range(count)])
        return self.stack([self.drawn(n, self.train[n % len(self.train)]) for n in range(count)])


def open_own(config: OwnData, code: Code, where: Callable[[str], str], *, seq: int, vocab: int, seed: int = 0) -> OwnSource:
    """Calls the function and looks at some samples. where(key): file and line of a config's key. seed: the run's. Raises InputError."""
    function = function_of(config, code, where)
    parameters = inspect.signature(function).parameters
    is_asked_by_split = "split" in parameters and not config.is_shipped

    def place(key: str) -> str:
        return f"{where(f'data.{key}')}: data.{key}"

    def call(split: str, shard: int = 0, shards: int = 1, epoch: int = 0) -> Any:
        offered = {"seq": seq, "vocab": vocab, "split": split, "shard": shard, "shards": shards, "epoch": epoch}
        return call_with(function, config.arguments, offered, lambda key: place(key or "source"))

    def splits(*which: int) -> tuple[Any, Any]:
        made = call("train", *which)
        return made if not is_asked_by_split and isinstance(made, tuple) and len(made) == 2 else (made, None)

    here, is_sharded = f"{place('source')}: {config.source}", {"shard", "shards"} <= parameters.keys()
    before = generators()
    train, held = splits()
    if is_asked_by_split:
        held = call("eval")
    fingerprint, transform = dict[str, str | int](source=config.source), None
    if config.transform is not None:
        made = load_object(config.transform, "data.transform", code, where("data.transform"))
        transform = Transform(function=made, where=f"{place('transform')}: {config.transform}", seed=seed)
    try:
        if _is_stream(train, here):
            samples = StreamSource(lambda *which: splits(*which)[0], here, train, is_sharded=is_sharded)
            # To read a stream again may take long. Without draws there is no need.
            is_same = config.is_shipped or generators() == before
            first, read, count = samples.first, lambda _: samples.first if is_same else samples.first_again(), 1
            fingerprint |= {"form": "stream"}
        else:
            samples = _indexed(train, here)
            first, read, count = samples[0], samples.__getitem__, len(samples)
            fingerprint |= {"train_samples": count}
        _check_keys(config, samples, place, named(train))
        element = samples.element if transform is None else transform.element(first)
        source = OwnSource(train=samples, held_out=None, element=element, fingerprint=fingerprint, transform=transform)
        if isinstance(samples, StreamSource):
            samples.drawn = source.drawn
        fingerprint |= _identity(read, read if transform is None else lambda n: source.drawn(n, read(n)), count)
        held = None if held is None else _held_out(held, element, f"{here} (eval)")
        if held:
            found = _identity(held.__getitem__, held.__getitem__, len(held))
            fingerprint |= {"eval_samples": len(held)} | {f"eval_{key}": value for key, value in found.items()}
    except SampleError as error:
        raise InputError([str(error)]) from error
    notes = () if not {"random", "eval_random"} & fingerprint.keys() else (f"{config.source}: {line_of(train, function)}{NOT_REPEATED}",)
    return replace(source, held_out=held or None, notes=notes)


def _check_keys(config: OwnData, samples: IndexedSamples | StreamSource, place: Callable[[str], str], made: str) -> None:
    """Raises InputError for keys that are for other samples. made: what the function returned."""
    is_stream = isinstance(samples, StreamSource)
    if config.shuffle_buffer and not is_stream:
        raise InputError([f"{place('shuffle_buffer')}: is for streams. data.shuffle shuffles samples with an index. Remove the key"])
    if config.resume == "exact" and is_stream and not samples.has_state:
        raise InputError([f"{place('resume')}: exact needs a stream that can say where it is, and {made} cannot. {_STATEFUL}"])


def _is_stream(made: object, where: str) -> bool:
    """Whether samples have an iterator and no index. Raises InputError for what is neither."""
    if isinstance(made, Mapping) or (not isinstance(made, str) and hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        return False
    if isinstance(made, str) or not hasattr(made, "__iter__"):
        raise InputError([f"{where}: returned {named(made)}. {_REMEDY}"])
    return True


def _indexed(made: Any, where: str) -> IndexedSamples:
    samples = IndexedSamples(made, where)
    if not len(samples):
        raise InputError([f"{where}: has no samples"])
    samples.element = shapes_of(samples[0], where)
    return samples


def _held_out(made: Any, element: SampleShapes, where: str) -> IndexedSamples:
    samples = held_out_samples(made, element, where) if _is_stream(made, where) else IndexedSamples(made, where)
    samples.element = element
    return samples


def _identity(read: Callable[[int], Sample], drawn: Callable[[int], Sample], count: int) -> dict[str, str | int]:
    """Returns what a fingerprint has of some samples, evenly spread: a checksum, without values where these are drawn at random.

    drawn: the samples as the run gets them. What a transform computes may differ between machines in the last place.
    """
    values, before = _hash(drawn, count), generators()
    # Code that sets a seed each time draws the same, and leaves the same state.
    if _hash(drawn, count) != values or generators() != before:
        return {"random": "yes", "sha256": _hash(read, count, has_values=False)}
    return {"sha256": values if drawn == read else _hash(read, count)}


def _hash(read: Callable[[int], Sample], count: int, *, has_values: bool = True) -> str:
    digest = hashlib.sha256()
    for index in sorted({i * (count - 1) // (_MOST_HASHED - 1) for i in range(_MOST_HASHED)}):
        for name, x in sorted(read(index).items()):
            digest.update(f"{name}{np.shape(x)}".encode() + (np.ascontiguousarray(x).tobytes() if has_values else b""))
    return digest.hexdigest()
