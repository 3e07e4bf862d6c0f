"""Batches of token windows, in an order that depends on the seed and on the global sample index, and on nothing else.

Training data is an endless sequence of samples: sample i is a window of the data, for every i from 0 on. Global batch k of a
run that starts at sample s consists of the samples s + k*batch to s + (k+1)*batch - 1, and each process reads only the rows
that its devices need. Nothing else is kept: there is no iterator state to save, to restore or to split over processes.

That one rule has three consequences. A run resumes at the right place from a single integer in its checkpoint. It may resume
with another number of processes, another mesh, or another accumulation, and still sees the same tokens in the same order. And
the samples of a bad step can be named and read again, as `--replay` does. The order is a function of the index because each
layer is: Grain's `shuffle` permutes indices with a seed per epoch, `repeat` makes the epochs endless, and `mix` assigns each
index to a part by weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from jgt.document import InputError

from .config import DataConfig, OwnData, path_problems
from .encoded import remove_leftovers
from .mapped import MappedFile
from .own import OwnSource
from .sources import PartKeys, SmallVocabError, Splits, open_splits, spared_tokens
from .stream import Windows, num_windows
from .tokenizer import Tokenizer, open_tokenizer

Batch = dict[str, np.ndarray]
"""Arrays [rows, ...] by name. Of tokens {"inputs": int32, "targets": int32, "weights": float32}, each [rows, seq]; weight 0 is padding."""
Stack = Callable[[Sequence[Any]], Batch]
"""The batch of some samples; None stands for a row of padding."""

# Threads, not processes: a row is a copy out of mapped memory and costs little Python.
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
_MAX_SAMPLES = 1 << 62
"""The length of endless data: Grain needs one, and a sum of indices must still fit 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Opened data: training batches, evaluation batches, and the tokenizer.

    `fingerprint` identifies the data, so that a resumed run can check that it sees the same. It does not change if the files move.
    """

    fingerprint: dict[str, str | int]
    train_sequences: int
    """The number of training samples, in all parts together: one epoch."""
    tokenizer: Tokenizer | None = None
    element: Mapping[str, jax.ShapeDtypeStruct] | None = None
    """Of data of the user's own: the arrays of one row."""
    pads: bool = True
    """Whether a row of padding has no weight, so that the last batch of an evaluation may have some."""
    _stack: Stack
    _mapped: tuple[MappedFile, ...] = ()
    # Lazy: Grain computes sample i when it is asked for. Infinite for training, one pass for evaluation.
    _train: grain.MapDataset
    _held_out: Mapping[str, grain.MapDataset]
    """By the name of the part of a mixture; under one name, or none, otherwise."""

    def train_batches(self, start_sample: int, batch: int, rows: Sequence[int], num_batches: int | None = None) -> Iterator[Batch]:
        """The given rows of global batches 0, 1, ... of a run that starts at sample `start_sample`. Endless without `num_batches`.

        batch: rows of a global batch; rows: which of them to read, each from 0 to batch - 1.
        """
        _check_rows(batch, rows)
        if num_batches is None:
            num_batches = (_MAX_SAMPLES - start_sample) // batch
        make = partial(_rows_of_batch, self._train, self._stack, start_sample, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    def eval_batches(self, batch: int, rows: Sequence[int], max_batches: int | None = None, *, part: str | None = None) -> Iterator[Batch]:
        """The given rows of the held-out samples, once and in order, of all parts one after another or of one of `eval_parts`.

        The last batch of a part is completed by rows of padding, or left out if the data has none. max_batches: of each part.
        """
        _check_rows(batch, rows)
        parts = self.eval_parts if part is None else (part,)
        return itertools.chain.from_iterable(self._eval_batches(self._held_out[part], batch, rows, max_batches) for part in parts)

    def _eval_batches(self, held_out: grain.MapDataset, batch: int, rows: Sequence[int], max_batches: int | None) -> Iterator[Batch]:
        # Rounded up where the last batch is padded.
        num_batches = -(-len(held_out) // batch) if self.pads else len(held_out) // batch
        if max_batches is not None:
            num_batches = min(num_batches, max_batches)
        make = partial(_rows_of_batch, held_out, self._stack, 0, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    def check(self) -> None:
        """Raises DataChangedError if a file that is read during the run has changed since it was opened.

        The batches look too, when they read from a file. This look is more thorough, and belongs before each save.
        """
        for mapped in self._mapped:
            mapped.check_contents()

    @property
    def eval_parts(self) -> tuple[str, ...]:
        """The names of the parts that hold data out."""
        return tuple(self._held_out)

    @property
    def eval_sequences(self) -> int:
        """The number of held-out samples."""
        return sum(map(len, self._held_out.values()))

    def eval_batch(self, batch: int, multiple: int) -> int:
        """The rows of a batch of an evaluation: `batch`, or without padding a smaller multiple that leaves out the fewest samples."""
        if self.pads or not self._held_out:
            return batch
        count = self.eval_sequences
        fits = range(multiple, min(batch, max(count, multiple)) + 1, multiple)
        # Of equal ones the largest.
        return min(reversed(fits), key=lambda size: count % size)


def open_data(
    config: DataConfig, *, seq: int, vocab: int, seed: int, cache_dir: Path, where: Callable[[str], str] = lambda key: ""
) -> Data:
    """Opens every file, checks every token against `vocab`, and sets the evaluation split apart.

    seq: tokens in a row of a batch; seed: of the order; cache_dir: the folder for encoded text. where(key): file and line of a dotted key,
    for messages. Raises InputError with all problems.
    """
    remove_leftovers(cache_dir)
    whole = PartKeys(prefix="data.", where=where)
    _raise_if_any([whole.at(key, f"data.{key}: {message}") for key, message in path_problems(config)])
    is_mixture = config.source == "mixture"
    places = [PartKeys(prefix=f"data.mixture[{i}]." if is_mixture else "data.", where=where) for i in range(len(config.parts()))]
    try:
        # `DataConfig.problems` made sure that all parts use one tokenizer.
        tokenizer = open_tokenizer(config.parts()[0].tokenizer)
    except InputError as error:
        raise InputError([places[0].at("tokenizer", problem) for problem in error.problems]) from None
    splits = _open_all(config, places, tokenizer, seq, vocab, cache_dir)
    _raise_if_any(list(_size_problems(config, places, splits, seq)))
    held_out = {
        name: grain.MapDataset.source(Windows(stream=split.held_out, seq=seq, vocab=vocab))
        for name, split in zip(config.part_names(), splits, strict=True)
        if split.held_out is not None
    }
    return Data(
        tokenizer=tokenizer,
        fingerprint=_fingerprint(config, splits),
        train_sequences=sum(num_windows(len(split.train), seq) for split in splits),
        _stack=partial(_stack_tokens, seq),
        _mapped=_mapped_files(splits),
        _train=_train_samples(config, splits, seq, vocab, seed),
        _held_out=held_out,
    )


def open_own_data(source: OwnSource, config: OwnData, *, seed: int) -> Data:
    """Data of the user's own, in an order that depends on the seed. Raises InputError if it has no samples."""
    return Data(
        fingerprint=source.fingerprint,
        train_sequences=len(source.train),
        element=source.element,
        pads=False,
        _stack=source.stack,
        _train=_endless(source.train, seed, 0, shuffles=config.shuffle),
        _held_out={} if source.held_out is None else {"eval": source.held_out},
    )


def _open_all(config: DataConfig, places: Sequence[PartKeys], tokenizer: Tokenizer, seq: int, vocab: int, cache_dir: Path) -> list[Splits]:
    splits, problems = [], []
    small: list[SmallVocabError] = []
    # Every part is opened, even after one has failed, so that the problems of all files are reported together.
    open_part = partial(open_splits, eval_tokens=config.eval_tokens, tokenizer=tokenizer, seq=seq, vocab=vocab, cache_dir=cache_dir)
    for part, keys in zip(config.parts(), places, strict=True):
        try:
            splits.append(open_part(part, keys))
        except SmallVocabError as error:
            small.append(error)
        except InputError as error:
            problems += error.problems
    needed = max((error.needed for error in small), default=0)
    remedy = f"Set model.vocab={needed}, or encode the data with a smaller vocabulary"
    _raise_if_any([*problems, *(f"{problem}. {remedy}" for error in small for problem in error.problems)])
    return splits


def _mapped_files(splits: list[Splits]) -> tuple[MappedFile, ...]:
    """Each file once: two splits may be parts of one file."""
    streams = (stream for split in splits for stream in (split.train, split.held_out) if stream is not None)
    mapped = (segment.mapped for stream in streams for segment in stream.segments)
    return tuple(dict.fromkeys(file for file in mapped if file is not None))


def _train_samples(config: DataConfig, splits: list[Splits], seq: int, vocab: int, seed: int) -> grain.MapDataset:
    """The endless sequence of training samples: index i gives int32 [seq + 1]."""
    parts = []
    for index, split in enumerate(splits):
        windows = grain.MapDataset.source(Windows(stream=split.train, seq=seq, vocab=vocab))
        # Endless, so that a small part of a mixture is repeated rather than used up.
        parts.append(_endless(windows, seed, index, shuffles=config.shuffle))
    return grain.MapDataset.mix(parts, weights=[part.weight for part in config.parts()])


def _endless(samples: grain.MapDataset, seed: int, index: int, *, shuffles: bool) -> grain.MapDataset:
    if shuffles:
        # Grain shuffles epoch e with seed + e. Without the hash, epoch 1 of seed 1 would be epoch 0 of seed 2.
        samples = samples.shuffle(seed=int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
    return samples.repeat()


def _rows_of_batch(samples: grain.MapDataset, stack: Stack, start: int, batch: int, rows: Sequence[int], index: int) -> Batch:
    """The rows of global batch `index`; sample `start` is the first row of batch 0."""
    positions = [start + index * batch + row for row in rows]
    # Only held-out data ends; the last batch of an evaluation is padded, so that all batches have one shape.
    return stack([samples[position] if position < len(samples) else None for position in positions])


def _stack_tokens(seq: int, samples: Sequence[Any]) -> Batch:
    tokens = np.zeros((len(samples), seq + 1), np.int32)
    weights = np.zeros((len(samples), seq), np.float32)
    for row, sample in enumerate(samples):
        if sample is not None:
            tokens[row], weights[row] = np.asarray(sample), 1.0
    # Slices of [rows, seq + 1] are not contiguous, and would keep the whole array alive.
    return {"inputs": np.ascontiguousarray(tokens[:, :-1]), "targets": np.ascontiguousarray(tokens[:, 1:]), "weights": weights}


def _prefetched(batches: grain.MapDataset) -> Iterator[Batch]:
    """The batches in order, read ahead by threads. Closing the generator ends the threads."""
    iterator = iter(batches.to_iter_dataset(_READ_OPTIONS))
    try:
        yield from iterator
    finally:
        # Reached, too, when the loop ends early and the generator is closed: otherwise the reading threads would live on.
        iterator.close()


def _size_problems(config: DataConfig, places: Sequence[PartKeys], splits: list[Splits], seq: int) -> Iterator[str]:
    """A split without a single window cannot be trained on or evaluated."""
    # One key holds out the tokens of all parts.
    whole = PartKeys(prefix="data.", where=places[0].where)
    for part, keys, split in zip(config.parts(), places, splits, strict=True):
        train, held_out = len(split.train), len(split.held_out or ())
        if part.eval_path is not None:
            if message := _too_short(part.eval_path, held_out, seq):
                yield keys.at("eval_path", message)
            held_out = 0
        if message := _too_short(part.label, train + held_out, seq):
            yield keys.at("path", message)
        elif config.eval_tokens and part.eval_path is None and (message := _bad_share(config.eval_tokens, train + held_out, seq)):
            yield whole.at("eval_tokens", f"data.eval_tokens: {message.format(part.label)}")


def _too_short(name: str, num_tokens: int, seq: int) -> str | None:
    if num_windows(num_tokens, seq):
        return None
    return f"data: {name} has {num_tokens:,} tokens, but one window of seq {seq} needs {seq + 1:,}. Give more data, or lower model.seq"


def _bad_share(held_out: int, num_tokens: int, seq: int) -> str | None:
    """What is wrong with the number of tokens to hold out of so many, which are at least one window. `{}` is the name of the data."""
    window = f"one window of seq {seq} needs {seq + 1:,}"
    if num_tokens < 2 * (seq + 1):
        none = "Set data.eval_tokens=0 for no evaluation, or lower model.seq"
        return f"{{}} has {num_tokens:,} tokens, too few to train on some and hold others out: {window}. {none}"
    if held_out <= seq:
        enough = f"Set data.eval_tokens={seq + 1} or more, or 0 for no evaluation"
        return f"{held_out:,} tokens are not enough to evaluate on: {window}. {enough}"
    if num_tokens - held_out <= seq:
        left = f"{max(num_tokens - held_out, 0):,} of the {num_tokens:,} tokens of {{}} remain to train on, but {window}"
        return f"{left}. Remove the key, which holds out {spared_tokens(num_tokens, seq):,}, or set it to at most {num_tokens - seq - 1}"
    return None


def _fingerprint(config: DataConfig, splits: list[Splits]) -> dict[str, str | int]:
    if config.source != "mixture":
        return splits[0].fingerprint
    parts = {f"mixture[{i}].{key}": value for i, split in enumerate(splits) for key, value in split.fingerprint.items()}
    # Under the same keys as for a single source, for the reader of data.json.
    totals = {key: sum(int(split.fingerprint[key]) for split in splits) for key in ("train_tokens", "eval_tokens")}
    return {"source": "mixture", **parts, **totals}


def _check_rows(batch: int, rows: Sequence[int]) -> None:
    if any(not 0 <= row < batch for row in rows):
        raise ValueError(f"rows {list(rows)} are not all rows of a batch of {batch} (0 to {batch - 1})")


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise InputError(problems)
