"""Files in a cache that show whether they are whole and, with a key, whether this user wrote them.

A compressed frame without a checksum unpacks to other bytes when a bit has changed. So each file begins with a SHA-256 over its name and
its content. The name is part of it because two whole files may be exchanged.

Anyone can compute such a checksum. In a folder that a run's file names, which a stranger may have filled, the checksum therefore has a key
of this user's, and the files are in a folder below it whose name only this user knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import platform
import secrets
import stat
from pathlib import Path
from typing import IO

from .disk import cache_folder

_SEAL_BYTES = hashlib.sha256().digest_size


class DamagedError(Exception):
    """The file has no content that can be trusted. The message continues a sentence that begins with the file's name."""


def read_sealed(path: Path, key: bytes = b"") -> bytes:
    """The content of a file of `write_sealed`. Raises DamagedError, or OSError if the file is absent or cannot be read."""
    with open_regular(path) as file:
        seal, content = file.read(_SEAL_BYTES), file.read()
    if seal != _seal(path.name, content, key):
        raise DamagedError("is damaged: its checksum differs")
    return content


def write_sealed(path: Path, content: bytes, key: bytes = b"") -> None:
    """Writes a file that shows whether it is whole, in place of an earlier one of the same name. Raises OSError.

    key: then it also shows whether someone who has the key wrote it.
    """
    # A short name: the file's own may be as long as names can be. The ending is one that `open_programs` removes after a killed process.
    new = path.with_name(f"{secrets.token_hex(8)}-cache")
    try:
        new.write_bytes(_seal(path.name, content, key) + content)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> IO[bytes]:
    """Opens a file to read. Raises DamagedError for anything else of this name, such as a pipe, at which reading would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise DamagedError("is not a file")
    return path.open("rb")


def default_folder() -> Path:
    """A folder in the user's cache, one for each kind of CPU: a program compiled for one kind may use instructions that another lacks.

    Raises RuntimeError for a user without a home.
    """
    base, features = cache_folder("compiled"), platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    return base / f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def own_folder(folder: Path) -> tuple[Path, bytes]:
    """The folder of this user's files below one that a stranger may have filled, and the key of their seals.

    Raises RuntimeError for a user without a home, and OSError.
    """
    path, new = default_folder().with_name("key"), default_folder().with_name(f"{secrets.token_hex(8)}-cache")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_SEAL_BYTES))
            # The key of another process that starts at this moment stays.
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    key = path.read_bytes()
    return folder / _seal("folder", b"", key).hex()[:16], key


def _seal(name: str, content: bytes, key: bytes) -> bytes:
    text = os.fsencode(name) + b"\0" + content
    return hmac.digest(key, text, "sha256") if key else hashlib.sha256(text).digest()
