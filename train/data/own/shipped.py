"""Streams that need no code of the user's: `data.source: hf:NAME` reads a dataset of Hugging Face.

A function here is one that a user could have written: the other keys of the section are its arguments, and it returns a stream for a shard
that can say where it is. It returns the training samples with the held-out ones, and its own `split` names a part of the dataset.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jgt.document import InputError, nearest, shown

from ...code.files import Code
from ...code.names import FAILURES, described, load_object
from ..config import OwnData

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

    def rows(dataset: Any, key: str, split: object, columns: Sequence[str] | None) -> Any:
        parts, match = dataset.as_streaming_dataset(), _SLICE.fullmatch(str(split))
        if match is None or match[1] not in parts:
            why = f"{shown(path)} has no split {shown(split)}. {nearest(str(split), parts)} Some rows of it are {next(iter(parts))}[A:B]"
            raise InputError([f"{place(key)}: {why}"])
        found = parts[match[1]].with_format("numpy")
        begin, end = int(match[2] or 0), match[3] and int(match[3])
        found = found.skip(begin) if begin else found
        found = found.take(max(end - begin, 0)) if isinstance(end, int) else found
        known = found.column_names or list(next(iter(found), {}))
        if wrong := [name for name in columns or () if name not in known]:
            raise InputError([f"{place('columns')}: there is no column {shown(wrong[0])}. {nearest(wrong[0], known)}"])
        return found if columns is None else found.select_columns(list(columns))

    def hf(
        shard: int,
        shards: int,
        *,
        name: str | None = None,
        split: str = "train",
        eval_split: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> tuple[Any, Any]:
        distributed = importlib.import_module("datasets.distributed")
        train = rows(builder(name), "split", split, columns)
        held = None if eval_split is None else rows(builder(name), "eval_split", eval_split, columns)
        return distributed.split_dataset_by_node(train, rank=shard, world_size=shards), held

    return hf


_SHIPPED = {"hf": _hugging_face}
