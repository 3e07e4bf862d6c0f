"""Streams that need no code of the user's: `data.source: hf:NAME` reads a dataset of Hugging Face, and `tar:PATH` files of WebDataset.

A function here is one that a user could have written: the other keys of the section are its arguments, and it returns a stream for a shard
that can say where it is. It returns the training samples with the held-out ones.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgt.document import InputError, nearest, shown

from ...files.bucket import is_url
from ...settings.code.files import Code
from ...settings.code.names import FAILURES, described, load_object
from ..config import BYTES, OwnData
from ..files import Finder
from ..special import WAYS_TO_NAME_AN_END
from ..tokenizer import open_tokenizer
from .tars import column_names, tar_files

_Place = Callable[[str], str]
"""The file, line and full name of a key of the section, for messages."""
_SLICE = re.compile(r"([^\[\]]+)(?:\[(\d*):(\d*)\])?")


def function_of(config: OwnData, code: Code, where: Callable[[str], str]) -> Callable[..., object]:
    """The function that makes the samples. where(key): file and line of a key of the config. Raises InputError."""
    kind, _, name = config.source.partition(":")
    make = _SHIPPED.get(kind)
    if make is None:
        return load_object(config.source, "data.source", code, where("data.source"))
    return make(name, lambda key: f"{where(f'data.{key}')}: data.{key}")


def _hugging_face(path: str, place: _Place) -> Callable[..., object]:
    """The rows of a dataset of the Hub, or of a folder with files, as arrays by column."""

    @functools.cache
    def builder(name: str | None) -> Any:
        try:
            there = str(Finder().files(path).root) if is_url(path) else path
            made = importlib.import_module("datasets").load_dataset_builder(there, name)
        except FAILURES as error:
            # Only this error is about the name, and it lists the names that there are.
            key, folder = "name" if "BuilderConfig" in str(error) else "source", Path(path).parent
            beside = [str(x) for x in folder.iterdir()] if key == "source" and folder.is_dir() else []
            near = nearest(path, beside, lists=False)
            raise InputError([f"{place(key)}: {shown(path)} cannot be opened: {described(error)}{near and f'. {near}'}"]) from error
        # A README.md chooses the files, and may be a stranger's.
        named, root = [str(file) for files in (made.config.data_files or {}).values() for file in files], Path(there).absolute()
        if others := [file for file in named if root.is_dir() and not Path(os.path.normpath(file)).is_relative_to(os.path.normpath(root))]:
            raise InputError([f"{place('source')}: {shown(path)} names {shown(others[0])}, which is outside of it. Copy the file into it"])
        return made

    def rows(dataset: Any, key: str, split: object, columns: Sequence[str] | None, source: str) -> Any:
        parts, match = dataset.as_streaming_dataset(), _SLICE.fullmatch(str(split))
        if match is None or match[1] not in parts:
            why = f"{shown(path)} has no split {shown(split)}. {nearest(str(split), parts)} Some rows of it are {next(iter(parts))}[A:B]"
            raise InputError([f"{place(key)}: {why}"])
        found = parts[match[1]].with_format("numpy")
        begin, end = int(match[2] or 0), match[3] and int(match[3])
        found = found.skip(begin) if begin else found
        found = found.take(max(end - begin, 0)) if isinstance(end, int) else found
        columns = column_names(columns)
        known = found.column_names or list(next(iter(found), {}))
        if wrong := [name for name in columns or () if name not in known]:
            raise InputError([f"{place(source)}: there is no column {shown(wrong[0])}. {nearest(wrong[0], known)}"])
        return found if columns is None else found.select_columns([*columns])

    def hf(
        shard: int,
        shards: int,
        seq: int,
        vocab: int,
        *,
        name: str | None = None,
        split: str = "train",
        eval_split: str | None = None,
        columns: Sequence[str] | None = None,
        text: str | None = None,
        tokenizer: str = BYTES,
    ) -> tuple[object, object]:
        distributed = importlib.import_module("datasets.distributed")
        if text is not None and columns is not None:
            raise InputError([f"{place('columns')}: text names the only column that is read. Remove one of them"])
        source = (columns, "columns") if text is None else ([text], "text")
        train = rows(builder(name), "split", split, *source)
        train = distributed.split_dataset_by_node(train, rank=shard, world_size=shards)
        held = None if eval_split is None else rows(builder(name), "eval_split", eval_split, *source)
        if text is None:
            return train, held
        encoder = _encoder(tokenizer, vocab, place)
        return _Windows(train, encoder, seq), held and _Windows(held, encoder, seq)

    return hf


def _encoder(name: str, vocab: int, place: _Place) -> Callable[[Mapping[str, object]], np.ndarray]:
    """A function from a row with one text to its tokens, with those around every text."""
    try:
        tokenizer = open_tokenizer(name)
        if (end := tokenizer.special.end_of_text) is None:
            raise InputError([f"{name} has no end-of-text token, which is needed to separate documents. {WAYS_TO_NAME_AN_END}"])
        if tokenizer.vocab_size > vocab:
            size = tokenizer.vocab_size
            raise InputError([f"{name} has {size:,} ids, and model.vocab is {vocab:,}. Set model.vocab={size}"])
    except InputError as error:
        raise InputError([f"{place('tokenizer')}: {problem}" for problem in error.problems]) from None

    def tokens_of(row: Mapping[str, object]) -> np.ndarray:
        (text,) = row.values()
        if not isinstance(text, str):
            raise ValueError(f"the column {next(iter(row))} is {type(text).__name__}, not text")
        return np.asarray([*tokenizer.special.beginning, *tokenizer.encode(text), end], np.int32)

    return tokens_of


class _Windows:
    """The texts of a dataset as rows of `seq` tokens. The last token that a row predicts is the first one of the next."""

    def __init__(self, rows: Any, encoder: Callable[[Mapping[str, object]], np.ndarray], seq: int):
        self._rows, self._encoder, self._seq = rows, encoder, seq
        self._place: dict[str, Any] = {"rows": None, "used": 0}

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of the dataset."""
        self._rows.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The state of the dataset before the first text that is not used up, None at the beginning, and how many of its tokens are."""
        return self._place

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Goes there."""
        self._place = state

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        before, used = self._place["rows"], self._place["used"]
        if before is not None:
            self._rows.load_state_dict(before)
        texts, left, weights = deque[tuple[object, np.ndarray]](), -used, np.ones(self._seq, np.float32)
        for row in self._rows:
            texts.append((before, self._encoder(row)))
            before, left = self._rows.state_dict(), left + len(texts[-1][1])
            if left <= self._seq:
                continue
            tokens = np.concatenate([text for _, text in texts])[used:]
            for begin in range(0, left - self._seq, self._seq):
                used, left = used + self._seq, left - self._seq
                while used >= len(texts[0][1]):
                    used -= len(texts.popleft()[1])
                self._place = {"rows": texts[0][0], "used": used}
                window = tokens[begin : begin + self._seq + 1]
                yield {"inputs": window[:-1], "targets": window[1:], "weights": weights}


_SHIPPED = {"hf": _hugging_face, "tar": lambda path, _: tar_files(path)}
