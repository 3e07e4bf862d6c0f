"""Batches of windows for the trainer. The order depends on the seed and on the global sample index, on nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grain
import numpy as np

from jgt.document import InputError
from train.data import tokenizer as tokenizers
from train.data.config import DataConfig, path_problems
from train.data.sources import Splits, open_splits
from train.data.stream import Stream
from train.data.tokenizer import Tokenizer
from train.data.windows import Windows, num_windows

Batch = dict[str, np.ndarray]

_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
_MAX_SAMPLES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Data:
    """Opened data. A batch is {"inputs": int32, "targets": int32, "weights": float32}, each [len(rows), seq].

    `fingerprint` tells whether a run that is resumed sees the same data; it survives a move of the files.
    """

    seq: int
    tokenizer: Tokenizer
    fingerprint: dict[str, str | int]
    _train: grain.MapDataset
    _held_out: grain.MapDataset | None

    def train_batches(self, start_sample: int, batch: int, rows: Sequence[int], num_batches: int | None = None) -> Iterator[Batch]:
        """Global batch k holds samples start_sample + k*batch and on; `rows` are this process's rows of it. Endless by default."""
        _check_rows(batch, rows)
        if num_batches is None:
            num_batches = (_MAX_SAMPLES - start_sample) // batch
        make = partial(_rows_of_batch, self._train, self.seq, start_sample, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    def eval_batches(self, batch: int, rows: Sequence[int], max_batches: int | None = None) -> Iterator[Batch]:
        """Once over the held-out windows in order; rows past the last window are zeros with weight 0."""
        _check_rows(batch, rows)
        if self._held_out is None:
            return iter(())
        num_batches = -(-len(self._held_out) // batch)
        if max_batches is not None:
            num_batches = min(num_batches, max_batches)
        make = partial(_rows_of_batch, self._held_out, self.seq, 0, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    @property
    def has_eval(self) -> bool:
        return self._held_out is not None

    @property
    def eval_sequences(self) -> int:
        return 0 if self._held_out is None else len(self._held_out)

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer; 256 for bytes."""
        return self.tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


def open_data(config: DataConfig, *, seq: int, vocab: int, seed: int, cache_dir: Path) -> Data:
    """Opens every file, checks every token against `vocab`, and holds out the evaluation split. Raises InputError."""
    _raise_any([f"data.{key}: {message}" for key, message in path_problems(config)])
    tokenizer = tokenizers.load(config.parts()[0].tokenizer)
    splits = _open_all(config, tokenizer, vocab, cache_dir)
    _raise_any(list(_size_problems(config, splits, seq)))
    held_out = [grain.MapDataset.source(Windows(stream=s.held_out, seq=seq)) for s in splits if s.held_out is not None]
    return Data(
        seq=seq,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(config, splits),
        _train=_train_samples(config, splits, seq, seed),
        _held_out=grain.MapDataset.concatenate(held_out) if held_out else None,
    )


def _open_all(config: DataConfig, tokenizer: Tokenizer, vocab: int, cache_dir: Path) -> list[Splits]:
    splits, problems = [], []
    for part in config.parts():
        try:
            opened = open_splits(part, eval_tokens=config.eval_tokens, tokenizer=tokenizer, vocab=vocab, cache_dir=cache_dir)
            splits.append(opened)
        except InputError as error:
            problems += error.problems
    _raise_any(problems)
    return splits


def _train_samples(config: DataConfig, splits: list[Splits], seq: int, seed: int) -> grain.MapDataset:
    """Sample i for every i from 0 on."""
    parts = []
    for index, split in enumerate(splits):
        windows = grain.MapDataset.source(Windows(stream=split.train, seq=seq))
        if config.shuffle:
            # Grain shuffles epoch e with seed + e: hashed first, seeds 1 and 2 do not share their epochs.
            windows = windows.shuffle(seed=int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
        parts.append(windows.repeat())
    return grain.MapDataset.mix(parts, weights=[part.weight for part in config.parts()])


def _rows_of_batch(samples: grain.MapDataset, seq: int, start: int, batch: int, rows: Sequence[int], index: int) -> Batch:
    tokens = np.zeros((len(rows), seq + 1), np.int32)
    weights = np.zeros((len(rows), seq), np.float32)
    for place, row in enumerate(rows):
        sample = start + index * batch + row
        if sample < len(samples):
            tokens[place], weights[place] = np.asarray(samples[sample]), 1.0
    return {"inputs": np.ascontiguousarray(tokens[:, :-1]), "targets": np.ascontiguousarray(tokens[:, 1:]), "weights": weights}


def _prefetched(batches: grain.MapDataset) -> Iterator[Batch]:
    iterator = iter(batches.to_iter_dataset(_READ_OPTIONS))
    try:
        yield from iterator
    finally:
        iterator.close()


def _size_problems(config: DataConfig, splits: list[Splits], seq: int) -> Iterator[str]:
    for part, split in zip(config.parts(), splits, strict=True):
        cut = part.eval_path is None and config.eval_tokens > 0
        lower = f"lower data.eval_tokens ({config.eval_tokens})" if cut else None
        yield from _size_problem(f"the train split of {part.name}", split.train, seq, lower)
        if split.held_out is not None:
            higher = f"raise data.eval_tokens ({config.eval_tokens}; 0 for no evaluation)" if cut else None
            yield from _size_problem(f"the eval split of {part.eval_path or part.name}", split.held_out, seq, higher)


def _size_problem(split: str, stream: Stream, seq: int, remedy: str | None) -> Iterator[str]:
    if num_windows(len(stream), seq) == 0:
        remedies = ", ".join(filter(None, ("Give more data", remedy, "or lower seq")))
        yield f"data: {split} has {len(stream)} tokens, but one window of seq {seq} needs {seq + 1}. {remedies}"


def _fingerprint(config: DataConfig, splits: list[Splits]) -> dict[str, str | int]:
    if config.source != "mixture":
        return splits[0].fingerprint
    parts = {f"mixture[{i}].{key}": value for i, split in enumerate(splits) for key, value in split.fingerprint.items()}
    totals = {key: sum(int(split.fingerprint[key]) for split in splits) for key in ("train_tokens", "eval_tokens")}
    return {"source": "mixture", **parts, **totals}


def _check_rows(batch: int, rows: Sequence[int]) -> None:
    if any(not 0 <= row < batch for row in rows):
        raise ValueError(f"rows {list(rows)} are not all rows of a batch of {batch} (0 to {batch - 1})")


def _raise_any(problems: Sequence[str]) -> None:
    if problems:
        raise InputError(problems)
