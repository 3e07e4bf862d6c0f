"""The files of a checkpoint, compared with its manifest. Needs neither JAX nor Orbax.

A step is whole if it has exactly the files that its manifest lists, each with the listed size and checksum. Anything that is not a regular
file is refused before it is read, because a pipe or a device would block the reader. A failing disk does not make a step broken: its error
stays an OSError (see `train.files.disk`).
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jgt.document import shown

from ..files.disk import kind, patiently
from .listing import FileEntry, Manifest
from .manifest import MAX_PATH, NAME, ODD_KINDS, BrokenError

_BLOCK = 1 << 22


def file_entries(folder: Path, *, sha256: bool) -> tuple[FileEntry, ...]:
    """An entry for each file of a step; reads every file once. Raises BrokenError for anything that is not a regular file."""
    with _readers() as readers:
        return tuple(readers.map(lambda path: _read_entry(folder, path, sha256=sha256), _files(folder)))


def file_problems(folder: Path, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Problems of the files of a step: missing, not listed, of another size, or with other content.

    part: (i, n) compares the content of every n-th file from the i-th on, so that n processes share the reading.
    """
    listed = {entry.path: entry for entry in manifest.files}
    present = {str(path.relative_to(folder)) for path in _files(folder)}
    yield from (f"{_text(path)} is missing" for path in sorted(listed.keys() - present))
    # An additional file is a problem too: Orbax chooses how to read a folder by the files in it.
    yield from (f"{_text(path)} does not belong to it" for path in sorted(present - listed.keys()))
    index, count = part
    with _readers() as readers:
        mine = sorted(listed.keys() & present)[index::count]
        yield from filter(None, readers.map(lambda path: _file_problem(folder, listed[path]), mine))


def _readers() -> ThreadPoolExecutor:
    # Threads suffice: reading a file and computing a checksum both release Python's global lock.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def _file_problem(folder: Path, entry: FileEntry) -> str | None:
    path = folder / entry.path
    # The size first: a file that was cut short need not be read.
    size = patiently(path.lstat, path).st_size
    if size != entry.size:
        return f"{_text(entry.path)} has {size} bytes instead of {entry.size}"
    if _read_entry(folder, path, sha256=entry.sha256 is not None) != entry:
        return f"{_text(entry.path)} has other content than was written (checksum)"
    return None


def _text(path: str) -> str:
    return shown(path, MAX_PATH, quotes=False)


def _files(folder: Path) -> list[Path]:
    """The files of a step except its manifest. A loop instead of a recursion, because folders may be nested very deeply."""
    files, folders = [], [folder]
    while folders:
        inner = folders.pop()
        for path in patiently(lambda inner=inner: list(inner.iterdir()), folder):
            name, what = _text(str(path.relative_to(folder))), kind(path)
            if what == stat.S_IFDIR:
                folders.append(path)
            elif what == stat.S_IFREG:
                files.append(path)
            else:
                raise BrokenError(f"{name} is {ODD_KINDS.get(what, 'no longer there')}")
    # Only at the top: a file of this name in a folder of Orbax's belongs to the step.
    return sorted(path for path in files if path.name not in (NAME, f"{NAME}.new") or path.parent != folder)


def _read_entry(folder: Path, path: Path, *, sha256: bool) -> FileEntry:
    def read() -> FileEntry:
        crc, size, digest = 0, 0, hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc, size = zlib.crc32(block, crc), size + len(block)
                if sha256:
                    digest.update(block)
        return FileEntry(path=str(path.relative_to(folder)), size=size, crc32=crc, sha256=digest.hexdigest() if sha256 else None)

    return patiently(read, path)
