"""Opens the `data:` section: every part of it, the held-out data apart, and the order of the samples.

All parts are opened even after one has failed, so that a user sees the problems of all files at once, each with the line of its key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

from jgt.document import InputError

from .batches import Data, Stack, stack_tokens
from .chat.keys import has_pairs
from .chat.rows import ChatRows, Pairs, as_row, stack_pairs, stack_rows
from .config import DataConfig, OwnData, Problem
from .encoded import remove_leftovers
from .mapped import MappedFile
from .own import OwnSource
from .own.shard import StreamSource
from .own.streams import Streams
from .paths import path_problems
from .sources import Opener, Samples, Splits, located, spared_tokens
from .special import WAYS_TO_NAME_AN_END
from .stream import Stream, Windows, num_windows
from .tokenizer import Tokenizer, open_tokenizer

_SEARCHED = 1 << 22
"""Tokens in which a token file must have an end of a document. A wrong id would otherwise pass for one long document."""
_NO_STATE = "{} is a stream without a state: a run that resumes reads it again up to its place (docs/own.md, Streams)"


def open_data(
    config: DataConfig, *, seq: int, vocab: int, seed: int, cache_dir: Path, where: Callable[[str], str] = lambda key: ""
) -> Data:
    """Opens every file, checks every token against `vocab`, and sets the evaluation split apart.

    seq: tokens in a row of a batch; seed: the seed of the order; cache_dir: the folder for encoded text.
    where(key): file and line of a dotted key, for messages. Raises InputError with all problems.
    """
    remove_leftovers(cache_dir)
    _raise_any([(f"data.{key}", f"data.{key}: {message}") for key, message in path_problems(config)], where)
    prefixes = [f"data.mixture[{i}]." if config.source == "mixture" else "data." for i in range(len(config.parts()))]
    with _located(where, f"{prefixes[0]}tokenizer"):
        # `DataConfig.problems` made sure that all parts use one tokenizer.
        tokenizer = open_tokenizer(config.parts()[0].tokenizer)
    with _located(where, "data.documents"):
        end = _end_of_documents(config, tokenizer, vocab)
    opener = Opener(
        tokenizer=tokenizer,
        seq=seq,
        vocab=vocab,
        end=end,
        eval_tokens=config.eval_tokens,
        cache_dir=cache_dir,
        where=where,
        copies=config.copies,
    )
    splits, problems = [], list[str]()
    for part, prefix in zip(config.parts(), prefixes, strict=True):
        with InputError.collect(problems):
            splits.append(opener.splits(part, prefix))
    too_small = [one for split in splits for one in split.too_small]
    remedy = f"Set model.vocab={max((needed for _, needed in too_small), default=0)}, or take the tokenizer of model.hf"
    with InputError.collect(problems):
        _raise_any([("model.vocab", f"{message}. {remedy}") for message, _ in too_small], where)
    if problems:
        raise InputError(problems)
    _raise_any(list(_size_problems(config, prefixes, splits, seq)), where)
    with _located(where, "data.documents"):
        _check_ends(config, [split.train.stream for split in splits], end)
    named = [*zip(config.part_names(), splits, strict=True)]
    held = [(name, split.held_out) for name, split in named if split.held_out is not None]
    held_out = {name: _dataset(config, samples, end) for name, samples in held}
    chats = [(f"{name}{end}", rows) for name, split in named for end, rows in (("", split.train), (" (held out)", split.held_out))]
    return Data(
        tokenizer=tokenizer,
        end=end,
        fingerprint=_fingerprint(config, splits),
        train_sequences=sum(len(split.train) for split in splits),
        pairs={part: pairs for part, pairs in (("train", splits[0].train), *held) if isinstance(pairs, Pairs)},
        notes=tuple(rows.describe(name) for name, rows in chats if isinstance(rows, ChatRows | Pairs)),
        _stack=_stack(config, seq, end),
        _mapped=_mapped_files(splits),
        _train=_train_samples(config, splits, end, seed),
        _held_out=held_out,
    )


def open_own_data(source: OwnSource, config: OwnData, *, seed: int, processes: int = 1) -> Data:
    """The samples of a user's function, in an order that depends on the seed. processes: those of the run."""
    if isinstance(source.train, StreamSource):
        train = Streams(source.train, buffer=config.shuffle_buffer, seed=seed, processes=processes)
        count, notes = None, () if source.train.has_state else (_NO_STATE.format(config.source),)
    else:
        train, count, notes = _endless(grain.MapDataset.source(source.train), seed, 0, shuffles=config.shuffle), len(source.train), ()
        train = train if source.transform is None else train.map_with_index(source.drawn)
    return Data(
        fingerprint=source.fingerprint,
        tokenizer=None if config.tokenizer_name is None else open_tokenizer(config.tokenizer_name),
        train_sequences=count,
        element=source.element,
        notes=(*notes, *source.notes),
        pads=False,
        _stack=source.stack,
        _train=train,
        _held_out={} if source.held_out is None else {"eval": grain.MapDataset.source(source.held_out)},
    )


def _end_of_documents(config: DataConfig, tokenizer: Tokenizer, vocab: int) -> int | None:
    """The token that ends a document; None if documents are not masked. Raises InputError."""
    if config.documents == "join":
        return None
    known, tokenizer_name = tokenizer.special.end_of_text, config.parts()[0].tokenizer
    end = known if config.end_of_text is None else config.end_of_text
    if end is None:
        missing = "no end-of-text token, which ends a document for data.documents: mask"
        raise InputError([f"{tokenizer_name}: {missing}. {WAYS_TO_NAME_AN_END}"])
    if end != known and any(part.source != "tokens" for part in config.parts()):
        message = f"data.end_of_text: {end} ends a document in the token files, but {known} in the text that {tokenizer_name} encodes"
        raise InputError([f"{message}. A mixture needs one id for both"])
    if end >= vocab:
        raise InputError([f"data.end_of_text: {end} is not in the vocabulary of {vocab} ids (0 to {vocab - 1}). Raise model.vocab"])
    return end


def _check_ends(config: DataConfig, streams: Sequence[Stream], end: int | None) -> None:
    """Raises InputError if a part's token files never end a document."""
    problems: list[str] = []
    for part, stream in zip(config.parts(), streams, strict=True):
        if end is None or part.source != "tokens":
            continue
        searched = min(len(stream), _SEARCHED)
        if not (stream.read(0, searched) == end).any():
            problems.append(
                f"data.documents: none of the first {searched:,} tokens of {part.label} is {end}, the end of a document. "
                "Give its id as data.end_of_text, or use documents: join"
            )
    if problems:
        raise InputError(problems)


def _raise_any(problems: Sequence[Problem], where: Callable[[str], str]) -> None:
    if problems:
        raise located(problems, where)


@contextlib.contextmanager
def _located(where: Callable[[str], str], key: str) -> Iterator[None]:
    """Inside, the problems of an InputError get the line of this key."""
    try:
        yield
    except InputError as error:
        _raise_any([(key, problem) for problem in error.problems], where)


def _size_problems(config: DataConfig, prefixes: Sequence[str], splits: list[Splits], seq: int) -> Iterator[Problem]:
    """Splits without a single window, which cannot be trained on or evaluated."""
    for part, prefix, split in zip(config.parts(), prefixes, splits, strict=True):
        train, held_out = (0 if samples is None else len(samples.stream) for samples in (split.train, split.held_out))
        if isinstance(split.train, ChatRows | Pairs):
            if not train:
                why = f"all conversations of {part.label} would be held out, which have {held_out:,} tokens together"
                yield "data.eval_tokens", f"data.eval_tokens: {why}. Set data.eval_tokens=0 for no evaluation, or a smaller number"
            continue
        if part.eval_path is not None:
            if message := _too_short(part.eval_path, held_out, seq):
                yield f"{prefix}eval_path", message
            held_out = 0
        if message := _too_short(part.label, train + held_out, seq):
            yield f"{prefix}path", message
        elif config.eval_tokens and part.eval_path is None and not seq < config.eval_tokens < train + held_out - seq:
            # One key holds out the tokens of all parts.
            yield "data.eval_tokens", f"data.eval_tokens: {_bad_share(config.eval_tokens, part.label, train + held_out, seq)}"


def _too_short(name: str, num_tokens: int, seq: int) -> str | None:
    if num_windows(num_tokens, seq):
        return None
    return f"data: {name} has {num_tokens:,} tokens, but one window of seq {seq} needs {seq + 1:,}. Give more data, or lower model.seq"


def _bad_share(held_out: int, name: str, num_tokens: int, seq: int) -> str:
    """Why so many of the tokens, which are at least one window, cannot be held out."""
    why = f"{held_out:,} of the {num_tokens:,} tokens of {name} cannot be held out: one window of seq {seq} needs {seq + 1:,}"
    if num_tokens < 2 * (seq + 1):
        return f"{why}, to train on and to evaluate on. Set data.eval_tokens=0 for no evaluation, or lower model.seq"
    fits = f"Set data.eval_tokens to a number from {seq + 1} to {num_tokens - seq - 1}, or to 0 for no evaluation"
    return f"{why}. {fits}, or remove the key, which holds out {spared_tokens(num_tokens, seq):,}"


def _dataset(config: DataConfig, samples: Samples, end: int | None) -> grain.MapDataset:
    """The samples of a part. Beside conversations, windows are rows too."""
    made: grain.MapDataset[Any] = grain.MapDataset.source(cast("Sequence[Any]", samples))
    return made.map(partial(as_row, end)) if config.has_chats and isinstance(samples, Windows) else made


def _stack(config: DataConfig, seq: int, end: int | None) -> Stack:
    if has_pairs(config.source):
        return partial(stack_pairs, seq)
    return partial(stack_rows, config.has_segments, seq) if config.has_chats else partial(stack_tokens, seq, end)


def _train_samples(config: DataConfig, splits: list[Splits], end: int | None, seed: int) -> grain.MapDataset:
    """The endless sequence of training samples: index i gives int32 [seq + 1]."""
    # Endless, so that a small part of a mixture is repeated rather than used up.
    datasets = (_dataset(config, split.train, end) for split in splits)
    parts = [_endless(dataset, seed, index, shuffles=config.shuffle) for index, dataset in enumerate(datasets)]
    return grain.MapDataset.mix(parts, weights=[part.weight for part in config.parts()])


def _endless(samples: grain.MapDataset, seed: int, index: int, *, shuffles: bool) -> grain.MapDataset:
    if shuffles:
        # Grain shuffles epoch e with seed + e. Without the hash, epoch 1 of seed 1 would be epoch 0 of seed 2.
        samples = samples.shuffle(seed=int(np.random.SeedSequence([seed, index]).generate_state(1)[0]))
    return samples.repeat()


def _mapped_files(splits: list[Splits]) -> tuple[MappedFile, ...]:
    """Each file once: two splits may be parts of one file."""
    samples = (samples for split in splits for samples in (split.train, split.held_out) if samples is not None)
    mapped = (segment.mapped for one in samples for segment in one.stream.segments)
    return tuple(dict.fromkeys(file for file in mapped if file is not None))


def _fingerprint(config: DataConfig, splits: list[Splits]) -> dict[str, str | int]:
    if config.source != "mixture":
        return splits[0].fingerprint
    parts = {f"mixture[{i}].{key}": value for i, split in enumerate(splits) for key, value in split.fingerprint.items()}
    # Under the same keys as for a single source, for the reader of data.json.
    totals = {key: sum(int(split.fingerprint[key]) for split in splits) for key in ("train_tokens", "eval_tokens")}
    return {"source": "mixture", **parts, **totals}
