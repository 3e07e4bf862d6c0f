"""Regular files, read whole and with a limit.

A path in a user's file may lead anywhere. Opening a named pipe blocks until someone writes to it, and /dev/zero never ends; on
a cluster either looks like a hang. So a path is read only if it leads to a regular file, and never more of it than the caller
expects. All functions take names that the operating system refuses (a NUL byte, 5,000 characters) as files that do not exist.

Some run files and rules come with jgt, by name: `jgt:quickstart`, `jgt:rules/fsdp`. The folder configs/ of the repository is also inside
the wheel, as jgt/configs, so a name with the prefix means the same file with and without a checkout, wherever the command runs.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Literal, cast

from jgt.document.problems import InputError, most_similar, shown

_MAX_BESIDE = 10_000
_PREFIX = "jgt:"
_PACKAGE = Path(__file__).parents[1]
_YAML = (".yaml", ".yml")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def url_problem(text: str) -> str | None:
    """Why a URL, such as `s3://bucket/run`, is refused as a path. None: the text is not a URL."""
    if not _URL.match(text):
        return None
    return f"{shown(text)} is a URL, but jgt reads and writes files only. Copy it to a disk, or mount it as a folder, and give that path"


LocalPath = Annotated[str, url_problem]
"""The type of a key that takes a path, for `jgt.document.bind`, which refuses a URL there."""


def path_problem(path: str | Path, kind: Literal["file", "folder"] = "file") -> str | None:
    """Why a path is not a regular file, or a folder: `No such file or directory`, `it is a named pipe, not a file`. None: it is."""
    try:
        mode = stat.S_IFMT(Path(path).stat().st_mode)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    actual = _KINDS.get(mode, "something else")
    return None if actual == f"a {kind}" else f"it is {actual}, not a {kind}"


def similar_file(path: str | Path) -> str:
    """` Did you mean 'run.yaml'?`, with the most similar file of the same kind beside a missing one; else YAML files there."""
    path = Path(path)
    suffixes = _YAML if path.suffix in _YAML else (path.suffix,)
    try:
        beside = {file.stem: file.name for file in path.parent.iterdir() if file.suffix in suffixes and not path_problem(file)}
    except (OSError, ValueError):
        return ""
    # Without the suffix, which all of them share.
    close = most_similar(path.stem, sorted(beside)[:_MAX_BESIDE])
    there = ", ".join(sorted(beside.values())[:8])
    return f" Did you mean {beside[close]!r}?" if close else f" Beside it: {there}." if there and path.suffix in _YAML else ""


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises InputError if it is not one, or larger."""
    data, problem = None, path_problem(path)
    if problem is None:
        problem = "it has nothing to read yet, like a pipe or a device"
        try:
            # Some files of /proc count as regular and block all the same. Opened without blocking, they read as None.
            with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                # One byte more than allowed shows that there is more.
                data = cast("bytes | None", file.read(most + 1))
        except OSError as error:
            problem = error.strerror or str(error)
    if data is None:
        near = similar_file(path) if problem == os.strerror(errno.ENOENT) else ""
        raise InputError([f"{path}: cannot be read: {problem}{'.' if near else ''}{near}"])
    if len(data) > most:
        raise InputError([f"{path}: the file is larger than {most:,} bytes, which is the limit for such a file"])
    return data


def read_text(path: str | Path, most: int) -> str:
    """The text of a UTF-8 file of at most `most` bytes, without its byte order mark. Raises InputError."""
    data = read_bytes(path, most)
    try:
        # The byte order mark is what some editors on Windows begin a file with.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problem = f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Save the file as UTF-8"
        raise InputError([f"{path}:{line}: {problem}"]) from None


def shipped_folder() -> Path:
    """The folder of the shipped files: inside an installed package, or beside the package in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def locate(path: str | Path, folder: str = "") -> Path:
    """The path; for `jgt:NAME`, the path of the shipped file of that name, which need not exist. folder: `rules` for names of rules."""
    text = str(path)
    return shipped_folder() / folder / f"{text.removeprefix(_PREFIX)}.yaml" if text.startswith(_PREFIX) else Path(path)
