"""Regular files, which can be read to their end: opening a pipe would wait for its writer, and a device has no end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jgt.document.node import InputError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_file(path: str | Path) -> bool:
    """Whether a path leads to a regular file; False, too, for a name that the system does not take."""
    return kind_problem(path) is None


def is_folder(path: str | Path) -> bool:
    """Whether a path leads to a folder; False, too, for a name that the system does not take."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def kind_problem(path: str | Path) -> str | None:
    """What keeps a path from being read as a file: `No such file or directory`, `it is a named pipe, not a file`. None: nothing does."""
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return None if kind == stat.S_IFREG else f"it is {_KINDS.get(kind, 'no file')}, not a file"


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises InputError."""
    problem = kind_problem(path)
    if problem is None:
        try:
            # A file of /proc may wait, too: its content is None then.
            with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                data: bytes | None = file.read(most + 1)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            if data is not None and len(data) > most:
                raise InputError([f"{path}: the file is larger than {most:,} bytes, the most that is read here"])
            if data is not None:
                return data
            problem = "it waits for its content"
    raise InputError([f"{path}: cannot be read: {problem}"])


def read_text(path: str | Path, most: int) -> str:
    """The text of a UTF-8 file of at most `most` bytes, with or without a byte order mark. Raises InputError."""
    data = read_bytes(path, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError([f"{path}:{line}: not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Save the file as UTF-8"]) from None
