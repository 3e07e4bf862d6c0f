"""A file that shows whether it is whole, and whether it is still the file that its name says.

Disks, copies and interrupted writes change files, and most formats do not notice: a compressed frame without a checksum unpacks to other
bytes. A sealed file begins with the length of its content and a SHA-256 over its name and its content. The name is part of it because two
whole files may be exchanged. Any change of one of these gives a `DamagedError` instead of content.

The seal shows accidents, not forgeries: whoever may write to the folder can also make a new seal.

A file gets its name only when it is complete, so concurrent readers and writers of one name meet whole files. Nothing waits for the disk:
a file that a power cut leaves incomplete is found by its seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import struct
from pathlib import Path

UNFINISHED = ".unfinished"
"""The end of the names of files that are being written. A killed process leaves them behind."""
_MAGIC = b"jgt sealed 1\n"
_HEADER = struct.Struct(f">{len(_MAGIC)}sQ32s")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamagedError(Exception):
    """The file has no content that can be trusted. The message continues a sentence that begins with the file's name."""


def read_sealed(path: Path) -> bytes:
    """The content of a sealed file. Raises DamagedError, or OSError if the file is absent or cannot be read."""
    _check_kind(os.lstat(path).st_mode)
    # Without waiting and without following: another process may replace the file by a pipe or a link at this moment.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise DamagedError("is cut off" if header else "is empty")
        magic, length, seal = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise DamagedError("does not begin like a sealed file")
        # Compared before anything is read: a wrong length may be any number.
        if status.st_size != _HEADER.size + length:
            raise DamagedError(f"has {status.st_size:,} bytes instead of {_HEADER.size + length:,}")
        content = file.read(length)
    if _seal(path.name, content) != seal:
        raise DamagedError("is damaged: its checksum differs")
    return content


def write_sealed(path: Path, content: bytes) -> None:
    """Writes a sealed file in place of an earlier one of the same name. Raises OSError."""
    # A short name of its own: that of the file may be as long as names can be.
    new = path.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
    try:
        # Not a temporary file of Python, which only its owner may read.
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(_HEADER.pack(_MAGIC, len(content), _seal(path.name, content)))
            file.write(content)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def remove_any(path: Path) -> None:
    """Removes whatever has this name, also a folder; nothing if nothing has it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise DamagedError(f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")


def _seal(name: str, content: bytes) -> bytes:
    seal = hashlib.sha256(_MAGIC + os.fsencode(name) + b"\0")
    seal.update(content)
    return seal.digest()
