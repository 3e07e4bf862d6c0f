"""Streams that need no code of the user's: `data.source: hf:NAME` reads a dataset of Hugging Face, and `tar:PATH` files of WebDataset.

A function here is one that a user could have written: the other keys of the section are its arguments, and it returns a stream for a shard
that can say where it is. It returns the training samples with the held-out ones.

A tar file is read without unpacking it. Neighbouring members whose names differ only behind the first dot are a sample, `0007.jpg` and
`0007.cls`, and the place behind a sample is a file and an offset in it: a run that resumes seeks. Members are not trusted: numpy loads no
pickles, and no member is larger than its file.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import tarfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jgt.document import InputError, nearest, shown

from ...code.files import Code
from ...code.names import FAILURES, described, load_object
from ..config import BYTES, OwnData
from ..files import Finder
from ..special import WAYS_TO_NAME_AN_END
from ..tokenizer import open_tokenizer

_Place = Callable[[str], str]
"""The file, line and full name of a key of the section, for messages."""
_SLICE = re.compile(r"([^\[\]]+)(?:\[(\d*):(\d*)\])?")


def function_of(config: OwnData, code: Code, where: Callable[[str], str]) -> Callable[..., Any]:
    """The function that makes the samples. where(key): file and line of a key of the config. Raises InputError."""
    kind, _, name = config.source.partition(":")
    make = _SHIPPED.get(kind)
    if make is None:
        return load_object(config.source, "data.source", code, where("data.source"))
    return make(name, lambda key: f"{where(f'data.{key}')}: data.{key}")


def _hugging_face(path: str, place: _Place) -> Callable[..., Any]:
    """The rows of a dataset of the Hub, or of a folder with files, as arrays by column."""

    @functools.cache
    def builder(name: str | None) -> Any:
        try:
            return importlib.import_module("datasets").load_dataset_builder(path, name)
        except FAILURES as error:
            # Only this error is about the name, and it lists the names that there are.
            key, folder = "name" if "BuilderConfig" in str(error) else "source", Path(path).parent
            beside = [str(x) for x in folder.iterdir()] if key == "source" and folder.is_dir() else []
            near = nearest(path, beside, lists=False)
            raise InputError([f"{place(key)}: {shown(path)} cannot be opened: {described(error)}{near and f'. {near}'}"]) from error

    def rows(dataset: Any, key: str, split: object, columns: Sequence[str] | None, source: str) -> Any:
        parts, match = dataset.as_streaming_dataset(), _SLICE.fullmatch(str(split))
        if match is None or match[1] not in parts:
            why = f"{shown(path)} has no split {shown(split)}. {nearest(str(split), parts)} Some rows of it are {next(iter(parts))}[A:B]"
            raise InputError([f"{place(key)}: {why}"])
        found = parts[match[1]].with_format("numpy")
        begin, end = int(match[2] or 0), match[3] and int(match[3])
        found = found.skip(begin) if begin else found
        found = found.take(max(end - begin, 0)) if isinstance(end, int) else found
        columns = _listed(columns)
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
    ) -> tuple[Any, Any]:
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


def _encoder(name: str, vocab: int, place: _Place) -> Callable[[Any], np.ndarray]:
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

    def tokens_of(row: Any) -> np.ndarray:
        (text,) = row.values()
        if not isinstance(text, str):
            raise ValueError(f"the column {next(iter(row))} is {type(text).__name__}, not text")
        return np.asarray([*tokenizer.special.beginning, *tokenizer.encode(text), end], np.int32)

    return tokens_of


class _Windows:
    """The texts of a dataset as rows of `seq` tokens. The last token that a row predicts is the first one of the next."""

    def __init__(self, rows: Any, encoder: Callable[[Any], np.ndarray], seq: int):
        self._rows, self._encoder, self._seq = rows, encoder, seq
        self._place: dict[str, Any] = {"rows": None, "used": 0}

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of the dataset."""
        self._rows.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state of the dataset before the first text that is not used up, None at the beginning, and how many of its tokens are."""
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes there."""
        self._place = state

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        before, used = self._place["rows"], self._place["used"]
        if before is not None:
            self._rows.load_state_dict(before)
        texts, left, weights = deque[tuple[Any, np.ndarray]](), -used, np.ones(self._seq, np.float32)
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


def _listed(columns: Sequence[str] | None) -> Sequence[str] | None:
    return [columns] if isinstance(columns, str) else columns


class _Tars:
    """The samples of tar files, every `step`-th of them from `first` on. columns: the arrays of a sample; None: all."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None, first: int = 0, step: int = 1):
        self._paths, self._columns, self._step = paths, _listed(columns), step
        self._place = {"file": 0, "offset": 0, "skip": first}

    def state_dict(self) -> dict[str, int]:
        """The next member's file and offset, and how many samples to skip there."""
        return self._place

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes there."""
        self._place = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        begin, skip = self._place["offset"], self._place["skip"]
        for number in range(self._place["file"], len(self._paths)):
            path = self._paths[number]
            try:
                for tar, members, end in _samples(path, begin):
                    if skip:
                        skip -= 1
                        continue
                    skip = self._step - 1
                    self._place = {"file": number, "offset": end, "skip": skip}
                    yield self._decoded(tar, members)
            except (tarfile.TarError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from error
            begin = 0

    def _decoded(self, tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> dict[str, Any]:
        sample, others = dict[str, Any](), list[str]()
        for member in members:
            name = _split_name(member)[1]
            content = tar.extractfile(member)
            # The fields of an object may be what is wanted of it.
            if content is None or (self._columns is not None and name not in (*self._columns, "json")):
                others.append(name)
                continue
            try:
                value = _value(name.rpartition(".")[2].lower(), content.read())
            except Exception as error:
                raise ValueError(f"{member.name}: {error}") from error
            sample |= value if isinstance(value, dict) else {name: value}
        if missing := [name for name in self._columns or () if name not in sample]:
            raise ValueError(f"{members[0].name}: the sample has no {shown(missing[0])}. {nearest(missing[0], [*sample, *others])}")
        return {name: sample[name] for name in self._columns or sample}


def _samples(path: Path, begin: int) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo], int]]:
    """The file, the members of each sample from a place on, and the place behind them."""
    members: list[tarfile.TarInfo] = []
    with path.open("rb") as file:
        file.seek(begin)
        with tarfile.TarFile(fileobj=file) as tar:
            for member in iter(tar.next, None):
                # It would keep all of them.
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
                if members and _split_name(member)[0] != _split_name(members[0])[0]:
                    yield tar, members, member.offset
                    members = []
                members += [member] if member.isreg() and not member.issparse() else []
            if members:
                yield tar, members, tar.offset
            file.seek(tar.offset)
            # tarfile takes a damaged header for the end.
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise ValueError(f"damaged at byte {tar.offset:,}")


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Splits the name into what members of a sample share, and the name of the array."""
    folder, _, name = member.name.rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}/{stem}", ending


def _value(kind: str, content: bytes) -> Any:
    """Reads a member. kind: the last part of its name."""
    if kind in _IMAGES:
        try:
            images = importlib.import_module("PIL.Image")
        except ImportError:
            raise ValueError("needs the package pillow. Install it: pip install pillow") from None
        return np.asarray(images.open(io.BytesIO(content)).convert("RGB"))
    if kind not in _READERS:
        raise ValueError(f"is none of {', '.join((*_READERS, *_IMAGES))}. Leave it out: data.columns lists what a sample has")
    return _READERS[kind](content)


def _tars(path: str, place: _Place) -> Callable[..., Any]:
    """The samples of tar files."""

    def tar(shard: int, shards: int, *, eval_path: str | None = None, columns: Sequence[str] | None = None) -> tuple[Any, Any]:
        paths = Finder().files(path).paths
        held = None if eval_path is None else _Tars(Finder().files(str(eval_path)).paths, columns)
        # With fewer files than shards, each shard reads all of them.
        return _Tars(paths[shard::shards], columns) if len(paths) >= shards else _Tars(paths, columns, shard, shards), held

    return tar


_IMAGES = ("jpg", "jpeg", "png", "webp")
_READERS: Mapping[str, Callable[[bytes], Any]] = {
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content)),
    "cls": int,
    "txt": bytes.decode,
}
_SHIPPED = {"hf": _hugging_face, "tar": _tars}
