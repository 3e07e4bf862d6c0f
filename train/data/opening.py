"""Opens the `data:` section: every part of it, apart from the held-out data, in the order of the samples.

All parts are opened even after one has failed, so that a user sees the problems of all files at once, each with the line of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jgt.document import InputError

from .batches import Batch, Data
from .boundaries import check_ends, end_of_documents, masked
from .config import DataConfig, MixturePart, OwnData, path_problems
from .encoded import remove_leftovers
from .mapped import MappedFile
from .own import OwnSource
from .sources import PartKeys, SmallVocabError, Splits, open_splits, spared_tokens
from .stream import Windows, num_windows
from .tokenizer import open_tokenizer


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
    with places[0].located("tokenizer"):
        # `DataConfig.problems` made sure that all parts use one tokenizer.
        tokenizer = open_tokenizer(config.parts()[0].tokenizer)
    with whole.located("documents"):
        end = end_of_documents(config, tokenizer, vocab)
    open_part = partial(open_splits, eval_tokens=config.eval_tokens, tokenizer=tokenizer, seq=seq, vocab=vocab, end=end)
    splits = _open_all(config, places, partial(open_part, cache_dir=cache_dir))
    _raise_if_any(list(_size_problems(config, places, splits, seq)))
    with whole.located("documents"):
        check_ends(config, [split.train for split in splits], end)
    held_out = {
        name: grain.MapDataset.source(Windows(stream=split.held_out, seq=seq, vocab=vocab))
        for name, split in zip(config.part_names(), splits, strict=True)
        if split.held_out is not None
    }
    return Data(
        tokenizer=tokenizer,
        end=end,
        fingerprint=_fingerprint(config, splits),
        train_sequences=sum(num_windows(len(split.train), seq) for split in splits),
        _stack=partial(_stack_tokens, seq, end),
        _mapped=_mapped_files(splits),
        _train=_train_samples(config, splits, seq, vocab, seed),
        _held_out=held_out,
    )


def open_own_data(source: OwnSource, config: OwnData, *, seed: int) -> Data:
    """The samples of a user's function, in an order that depends on the seed. Raises InputError if there are none."""
    return Data(
        fingerprint=source.fingerprint,
        train_sequences=len(source.train),
        element=source.element,
        pads=False,
        _stack=source.stack,
        _train=_endless(source.train, seed, 0, shuffles=config.shuffle),
        _held_out={} if source.held_out is None else {"eval": source.held_out},
    )


def _open_all(config: DataConfig, places: Sequence[PartKeys], open_part: Callable[[MixturePart, PartKeys], Splits]) -> list[Splits]:
    splits, problems = [], []
    small: list[SmallVocabError] = []
    # Every part is opened, even after one has failed, so that the problems of all files are reported together.
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
    """Why `held_out` of `num_tokens` tokens, which are at least one window, cannot be held out. `{}` is the name of the data."""
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


def _stack_tokens(seq: int, end: int | None, samples: Sequence[Any]) -> Batch:
    tokens = np.zeros((len(samples), seq + 1), np.int32)
    weights = np.zeros((len(samples), seq), np.float32)
    for row, sample in enumerate(samples):
        if sample is not None:
            tokens[row], weights[row] = np.asarray(sample), 1.0
    # Slices of [rows, seq + 1] are not contiguous, and would keep the whole array alive.
    batch = {"inputs": np.ascontiguousarray(tokens[:, :-1]), "targets": np.ascontiguousarray(tokens[:, 1:]), "weights": weights}
    return batch if end is None else masked(batch, end)


def _mapped_files(splits: list[Splits]) -> tuple[MappedFile, ...]:
    """Each file once: two splits may be parts of one file."""
    streams = (stream for split in splits for stream in (split.train, split.held_out) if stream is not None)
    mapped = (segment.mapped for stream in streams for segment in stream.segments)
    return tuple(dict.fromkeys(file for file in mapped if file is not None))


def _fingerprint(config: DataConfig, splits: list[Splits]) -> dict[str, str | int]:
    if config.source != "mixture":
        return splits[0].fingerprint
    parts = {f"mixture[{i}].{key}": value for i, split in enumerate(splits) for key, value in split.fingerprint.items()}
    # Under the same keys as for a single source, for the reader of data.json.
    totals = {key: sum(int(split.fingerprint[key]) for split in splits) for key in ("train_tokens", "eval_tokens")}
    return {"source": "mixture", **parts, **totals}


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise InputError(problems)
