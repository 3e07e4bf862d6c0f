"""Checks the files that a run's data names: they are there, have the right kind, and are not held out and trained on. Imports no JAX.

It looks at names, kinds and permissions, and opens no file. So `jgt check` answers for a cluster's data in a moment, and a start
answers before it reads any of it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from jgt.document import InputError, path_problem

from ..files.bucket import is_url
from ..settings.packages import is_installed
from .chat.keys import CHATS
from .config import BYTES, SUFFIXES, DataConfig, MixturePart, OwnData, Problem
from .files import Finder, standard_library

_MAX_PROBLEMS = 20


def path_problems(config: DataConfig | OwnData) -> Iterator[Problem]:
    """Problems of the files that the config names. Looks at names, kinds and permissions, and opens no file."""
    if isinstance(config, OwnData):
        if config.source.startswith("hf:") and not is_installed("datasets"):
            yield "source", "hf needs the package datasets. Install it: pip install 'jgt[hf]'"
        kind, _, path = config.source.partition(":")
        if kind == "tar" and path:
            eval_path = config.arguments.get("eval_path")
            part = MixturePart(weight=1, source=cast("Any", kind), path=path, eval_path=eval_path and str(eval_path))
            yield from (("source" if key == "path" else key, message) for key, message in _part_path_problems(part, Finder()))
        return
    # One finder for all paths: its budget of names is for the whole config.
    finder = Finder(config.copies)
    for index, part in enumerate(config.parts()):
        prefix = f"mixture[{index}]." if config.source == "mixture" else ""
        yield from ((prefix + key, message) for key, message in (*_missing(part), *_part_path_problems(part, finder)))


def _missing(part: MixturePart) -> Iterator[Problem]:
    if part.source in ("parquet", "arrow") and not is_installed("pyarrow"):
        yield "source", f"{part.source} needs the package pyarrow. Install it: pip install 'jgt[data]'"
    yield from part.missing(part.source)
    if part.tokenizer != BYTES and not is_url(part.tokenizer):
        if path_problem(part.tokenizer):
            yield "tokenizer", f"no such file: {part.tokenizer}. Write bytes, or the path of a tokenizer.json"
        elif not os.access(part.tokenizer, os.R_OK):
            yield "tokenizer", f"no permission to read {part.tokenizer}"
    if part.path is None and not standard_library().paths:
        yield "source", "this Python has no standard library in source form. Use the source text and a path"


def _part_path_problems(part: MixturePart, finder: Finder) -> Iterator[Problem]:
    whole: dict[str, list[str]] = {}
    for key, path in (("path", part.path), ("eval_path", part.eval_path)):
        if path is None:
            continue
        try:
            matches = finder.names(path)
            problems = list(_file_problems(path, part.source, matches))
            whole |= {} if problems else {key: matches}
        except InputError as error:
            problems = error.problems
        # A folder of the wrong kind has thousands of bad files.
        yield from ((key, problem) for problem in problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            yield key, f"and {len(problems) - _MAX_PROBLEMS:,} more such files"
    # Links are resolved, because two names may lead to one file.
    trained_on = {_resolved(file) for file in whole.get("path", ())}
    if shared := [file for file in whole.get("eval_path", ()) if _resolved(file) in trained_on]:
        more = f" (and {len(shared) - 1} more files)" if len(shared) > 1 else ""
        matches = f"{shared[0]} is training data too{more}: path {part.path} matches it as well"
        yield "eval_path", f"{matches}. Keep held-out files apart"


def _resolved(file: str) -> str:
    return file if is_url(file) else os.path.realpath(file)


def _file_problems(path: str, source: str, matches: list[str]) -> Iterator[str]:
    if not matches:
        here = "" if is_url(path) else f" (working directory: {Path.cwd()})"
        if not path_problem(path, "folder"):
            yield f"the folder {path} has no files"
        else:
            yield f"no file matches {path}{here}" if glob.has_magic(path) else f"no such file or folder: {path}{here}"
    for file in matches:
        if not is_url(file) and (problem := path_problem(file)):
            yield f"{file} cannot be read: {problem}"
        elif not is_url(file) and not os.access(file, os.R_OK):
            yield f"no permission to read {file}"
        elif Path(file).suffix not in (ends := SUFFIXES.get(source, (Path(file).suffix,))):
            kind = "a token file" if source == "tokens" else f"a file of the source {source}"
            folder = Path(path).parent if path_problem(path, "folder") else Path(path)
            there = f"{file.rpartition('/')[0]}/*{ends[0]}" if is_url(file) else folder / f"*{ends[0]}"
            yield (
                f"{file} is not {kind}: its name must end in {' or '.join(end for end in ends if end != '.idx')}. "
                f"To choose among a folder's files, use a glob such as {there}"
            )
    if matches and all(Path(file).suffix == ".idx" for file in matches):
        yield f"{matches[0]} is only an index. Name the .bin file beside it"
    packed = [file for file in matches if Path(file).suffix == ".zst"] if source in ("text", "jsonl", *CHATS) else []
    columns = [file for file in matches if Path(file).suffix in SUFFIXES["parquet"]] if source in CHATS else []
    if columns and not is_installed("pyarrow"):
        yield f"{columns[0]} needs the package pyarrow. Install it: pip install 'jgt[data]'"
    if packed and not is_installed("zstandard"):
        yield f"{packed[0]} needs the package zstandard. Install it (pip install 'jgt[data]'), or unpack the file"
