"""Reading and writing so that three things are not confused: a damaged file, a disk that is away, and a loss of power.

A file that is missing, or is not a regular file, is damage: it stays so, and the checkpoint must not be used. Any other error of the system
(an input/output error, no permission, a server that does not answer) says nothing about the file. So such a call is repeated for some
seconds, each time with a line on stderr, and then the error is raised as it is. The invariant: an OSError for which `is_damage` is false
never becomes a verdict on a checkpoint.

A write reaches the disk only with fsync, and the name of a file only with fsync of its folder. Needs neither JAX nor Orbax.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from jgt.document import shown

from .ends import EndError
from .streams import say

_PAUSES = (0.5, 1.0, 2.0)
"""Seconds before each new try: a network or a server often comes back within them."""
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_MAX_LINE = 5_000
_Result = TypeVar("_Result")


class DiskError(EndError):
    """The disk of a checkpoint cannot be read; nothing is known about the checkpoint. The message names path and error."""


def is_damage(error: OSError) -> bool:
    """Whether a file is missing or of another kind, as opposed to a disk that cannot be read."""
    return error.errno in _DAMAGE


def describe(error: OSError, path: Path | str) -> str:
    """`PATH: Input/output error` in one line. path: used if the error names none."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(path)
    return shown(f"{name}: {error.strerror or error}", _MAX_LINE, quotes=False)


def patiently(call: Callable[[], _Result], path: Path | str) -> _Result:
    """The result of a call that reads below `path`, which is repeated after errors of the disk. Raises the last OSError."""
    for seconds in _PAUSES:
        try:
            return call()
        except OSError as error:
            if is_damage(error):
                raise
            say(f"{describe(error, path)}. Trying again in {seconds:g} s")
        time.sleep(seconds)
    return call()


def kind(path: Path, *, follow: bool = False) -> int | None:
    """The kind of what is at a path, such as stat.S_IFDIR; None: nothing. Tried again as in `patiently`. Raises OSError if it is not known.

    follow: whether to return the kind of a link's target.
    """
    try:
        # Not `is_dir` and its like: which errors they hide depends on the version of Python.
        return stat.S_IFMT(patiently(lambda: path.stat(follow_symlinks=follow), path).st_mode)
    except OSError as error:
        if is_damage(error):
            return None
        raise
    except ValueError:
        # A path with a zero byte.
        return None


def open_file(path: Path) -> IO[bytes]:
    """Opens a regular file to read. Raises OSError for anything else of this name: a pipe would block, a device might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def cache_folder(name: str) -> Path:
    """A folder of the user's cache: `$XDG_CACHE_HOME/jgt/NAME`, or `~/.cache/jgt/NAME`. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jgt", name).absolute()


def sync_tree(folder: Path) -> None:
    """Writes all files below a folder to disk, then all folders, the innermost first, and last the folder itself."""
    for inner, _, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def sync(path: Path) -> None:
    """Writes a file's contents, or a folder's entries, to disk. A new name is an entry, which fsync of the file does not write."""
    # Reading suffices for fsync. A file may belong to another user of the same group.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_above(path: Path) -> None:
    """Writes the entries of all folders above a path to disk, because some may be new. As far as permissions allow."""
    for parent in path.parents:
        with contextlib.suppress(OSError):
            sync(parent)


def _raise(error: OSError) -> None:
    raise error


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file of a run directory. A kill or a power cut leaves the old one or the new one. Raises OSError."""
    data = content.encode() if isinstance(content, str) else content
    # A start that changes nothing needs no room on the disk.
    with contextlib.suppress(OSError), open_file(path) as old:
        if old.read(len(data) + 1) == data:
            return
    # Other processes of the run may read the file at this moment: they see the old one or the new one, never a part.
    with replaced(path, is_of_run=True) as new, new.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replaced(path: Path, *, is_of_run: bool = False) -> Iterator[Path]:
    """The path of a new file, which is written inside and then replaces the one at `path`. After an error it is gone. Raises OSError.

    is_of_run: whatever is there is replaced. Otherwise what is not a regular file, such as /dev/stdout, is written as it is.
    """
    is_replaced = is_of_run or kind(path) in (None, stat.S_IFREG)
    new = path.with_name(f"{path.name}{'' if is_of_run else f'.{os.getpid()}'}.new") if is_replaced else path
    try:
        if is_replaced:
            # A stranger's directory may have a link of this name.
            new.unlink(missing_ok=True)
        yield new
        if is_replaced:
            new.replace(path)
    except OSError as error:
        if is_replaced:
            with contextlib.suppress(OSError):
                new.unlink()
        # The system names a path only where opening fails.
        raise OSError(error.errno, error.strerror, str(path)) from None
