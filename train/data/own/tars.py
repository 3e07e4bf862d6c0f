"""The samples of tar files as WebDataset writes them: `data.source: tar:PATH`.

A file is read without unpacking it. Neighbouring members whose names differ only behind the first dot are a sample, `0007.jpg` and
`0007.cls`, and the place behind a sample is a file and an offset in it: a run that resumes seeks. Members are not trusted: numpy loads no
pickles, and no member is larger than its file.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jgt.document import InputError, nearest, shown

from ...files.cache import ObjectCache
from ...files.json_text import json_value
from ..files import Finder

_PART = 1 << 20
_IMAGES = ("jpg", "jpeg", "png", "webp")
_READERS: Mapping[str, Callable[[bytes], object]] = {
    "json": json_value,
    "npy": lambda content: np.load(io.BytesIO(content)),
    "cls": int,
    "txt": bytes.decode,
}


def column_names(columns: Sequence[str] | None) -> Sequence[str] | None:
    """The value of `data.columns`, which may be a single name."""
    return [columns] if isinstance(columns, str) else columns


class _Tars:
    """The samples of tar files, every `step`-th of them from `first` on. columns: the arrays of a sample; None: all."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None, first: int = 0, step: int = 1):
        self._paths, self._columns, self._step = paths, column_names(columns), step
        self._place = {"file": 0, "offset": 0, "skip": first}

    def state_dict(self) -> dict[str, int]:
        """The next member's file and offset, and how many samples to skip there."""
        return self._place

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes there."""
        self._place = state

    def __iter__(self) -> Iterator[dict[str, object]]:
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

    def _decoded(self, tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> dict[str, object]:
        sample, others = dict[str, object](), list[str]()
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
        size = os.fstat(file.fileno()).st_size
        file.seek(begin)
        with tarfile.TarFile(fileobj=file) as tar:
            for member in iter(tar.next, None):
                # It would keep all of them.
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
                if members and _split_name(member)[0] != _split_name(members[0])[0]:
                    yield tar, members, member.offset
                    members = []
                if member.size > size - member.offset_data:
                    raise ValueError(f"{member.name}: has {member.size:,} bytes by its header, more than the file behind it. Copy it again")
                members += [member] if member.isreg() and not member.issparse() else []
            if members:
                yield tar, members, tar.offset
            _check_end(file, tar.offset)


def _check_end(file: IO[bytes], end: int) -> None:
    """Raises ValueError if there is more in a tar file than what has been read of it, or less than a whole one has."""
    file.seek(end)
    parts = iter(lambda: file.read(_PART), b"")
    if len(first := next(parts, b"")) < tarfile.BLOCKSIZE:
        raise ValueError(f"cut at byte {end:,}: a whole tar file ends with blocks of zeros. Copy it again")
    # tarfile takes a damaged header and a hole for the end.
    if any(part.strip(b"\0") for part in itertools.chain([first], parts)):
        why = "a header is damaged, the file has a hole, or it is several tar files in one. Copy it again, or name each by itself"
        raise ValueError(f"damaged at byte {end:,}, where it ends, but there is more behind: {why}")


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Splits the name into what members of a sample share, and the name of the array."""
    folder, _, name = member.name.rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}/{stem}", ending


def _value(kind: str, content: bytes) -> object:
    """Reads a member. kind: the last part of its name."""
    if kind in _IMAGES:
        try:
            images = importlib.import_module("PIL.Image")
        except ImportError:
            raise ValueError("needs the package pillow. Install it: pip install pillow") from None
        return np.asarray(images.open(io.BytesIO(content)).convert("RGB"))
    if kind not in _READERS:
        raise ValueError(f"is not one of {', '.join((*_READERS, *_IMAGES))}. Leave it out: data.columns lists what a sample has")
    return _READERS[kind](content)


def tar_files(path: str) -> Callable[..., object]:
    """A function that returns the samples of a shard of tar files, and the held-out ones. path: a file, a folder or a glob."""

    # A URL is not asked again for each shard and epoch.
    @functools.cache
    def files(place: str, cache: ObjectCache) -> Sequence[Path]:
        return Finder(cache).files(place).paths

    def tar(
        shard: int,
        shards: int,
        *,
        eval_path: str | None = None,
        columns: Sequence[str] | None = None,
        cache: str | None = None,
        cache_bytes: Any = None,
    ) -> tuple[object, object]:
        if not isinstance(cache_bytes, int | None):
            raise InputError([f"data.cache_bytes: must be a whole number, not {shown(cache_bytes)}"])
        copies = ObjectCache(folder=cache, most_bytes=cache_bytes)
        paths = files(path, copies)
        held = None if eval_path is None else _Tars(files(str(eval_path), copies), columns)
        # With fewer files than shards, each shard reads all of them.
        return _Tars(paths[shard::shards], columns) if len(paths) >= shards else _Tars(paths, columns, shard, shards), held

    return tar
