"""What a checkpoint is made of: a list of its arrays and of its files with their checksums, written last and read first.

Orbax keeps no checksum of what it writes: a flipped bit comes back as another weight. Free of JAX and Orbax.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jgt.document import InputError, kind_problem, printable, read_bytes, shown

NAME = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 22
_MAX_BYTES = 1 << 26
_MAX_NUMBER = 1 << 62
_MAX_PATH = 300
_DTYPE = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|b?float16|float(32|64)|complex(64|128)|float4_e2m1fn|"
    r"float8_(e3m4|e4m3|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
"""All that JAX has."""


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One array: its path, shape and element type."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its path below the step, bytes, CRC-32 and, where asked for, SHA-256."""

    path: str
    size: int
    crc32: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint. samples: sequences of training data consumed; fingerprints: of config and data; mesh: axis sizes it was saved on."""

    step: int
    samples: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    fingerprints: Mapping[str, Any]
    arrays: tuple[ArrayEntry, ...]
    files: tuple[FileEntry, ...]
    format: int = FORMAT


class BrokenError(Exception):
    """A step that may not be used; the message says why."""


def file_entries(folder: Path, *, sha256: bool) -> tuple[FileEntry, ...]:
    """All files of a step, read once. Raises BrokenError for links, and for pipes, which would wait for a writer."""
    with _readers() as readers:
        return tuple(readers.map(lambda path: _entry(folder, path, sha256=sha256), _files(folder)))


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest so that it is whole or absent, and on disk when this returns."""
    path, new = folder / NAME, folder / f"{NAME}.new"
    with new.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """The manifest of a step. Raises BrokenError."""
    path = folder / NAME
    if path.is_symlink():
        raise BrokenError(f"{NAME} is a link")
    if not path.exists():
        raise BrokenError(f"it has no {NAME}: it was never finished")
    try:
        return _parse(json.loads(read_bytes(path, _MAX_BYTES)))
    except InputError as error:
        raise BrokenError(str(error)) from None
    except RecursionError:
        raise BrokenError(f"{NAME} is damaged: it is nested too deep") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenError(f"{NAME} is damaged: {printable(f'{type(error).__name__}: {error}')}") from None


def check(folder: Path, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """What is wrong with the files of a step: missing, more than listed, of another size, or with other content.

    part: (i, n) checks the content of every n-th file from the i-th on, so that n processes share the reading.
    """
    listed = {entry.path: entry for entry in manifest.files}
    found = {str(path.relative_to(folder)) for path in _files(folder)}
    yield from (f"{printable(path)} is missing" for path in sorted(listed.keys() - found))
    yield from (f"{printable(path)} does not belong to it" for path in sorted(found - listed.keys()))
    index, count = part
    with _readers() as readers:
        parts = sorted(listed.keys() & found)[index::count]
        yield from filter(None, readers.map(lambda path: _problem(folder, listed[path]), parts))


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _readers() -> ThreadPoolExecutor:
    # Reading and checksums leave Python's lock to others.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def _problem(folder: Path, entry: FileEntry) -> str | None:
    size = (folder / entry.path).stat().st_size
    if size != entry.size:
        return f"{printable(entry.path)} has {size} bytes instead of {entry.size}"
    if _entry(folder, folder / entry.path, sha256=entry.sha256 is not None) != entry:
        return f"{printable(entry.path)} has other content than was written (checksum)"
    return None


def _files(folder: Path) -> list[Path]:
    found, folders = [], [folder]
    while folders:
        for path in folders.pop().iterdir():
            name = printable(str(path.relative_to(folder)))
            if path.is_symlink():
                raise BrokenError(f"{name} is a link")
            if path.is_dir():
                folders.append(path)
            elif problem := kind_problem(path):
                raise BrokenError(f"{name} cannot be read: {problem}")
            else:
                found.append(path)
    return sorted(path for path in found if path.name not in (NAME, f"{NAME}.new") or path.parent != folder)


def _entry(folder: Path, path: Path, *, sha256: bool) -> FileEntry:
    crc, size, digest = 0, 0, hashlib.sha256() if sha256 else None
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
            if digest is not None:
                digest.update(block)
    return FileEntry(path=str(path.relative_to(folder)), size=size, crc32=crc, sha256=None if digest is None else digest.hexdigest())


def _parse(values: Any) -> Manifest:
    if type(_mapping(values).get("format")) is not int or values["format"] != FORMAT:
        raise ValueError(f"format {shown(values.get('format'))}, not {FORMAT}")
    arrays = [ArrayEntry(path=_text(a["path"]), shape=tuple(map(_number, _list(a["shape"]))), dtype=_dtype(a["dtype"])) for a in _list(values["arrays"])]
    files = [
        FileEntry(path=_inside(f["path"]), size=_number(f["size"]), crc32=_number(f["crc32"]), sha256=None if f.get("sha256") is None else _text(f["sha256"]))
        for f in _list(values["files"])
    ]
    return Manifest(
        step=_number(values["step"]),
        samples=_number(values["samples"]),
        mesh={axis: _number(size) for axis, size in _mapping(values["mesh"]).items()},
        versions={name: _text(version) for name, version in _mapping(values["versions"]).items()},
        fingerprints=_mapping(values["fingerprints"]),
        arrays=tuple(arrays),
        files=tuple(files),
    )


def _inside(path: Any) -> str:
    """A path that stays below the step's folder."""
    parts = Path(_text(path)).parts
    if not parts or Path(path).is_absolute() or ".." in parts or len(path) > _MAX_PATH:
        raise ValueError(f"the path {shown(path)} leads outside, or is too long")
    return path


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    return value


def _dtype(value: Any) -> str:
    if not _DTYPE.fullmatch(_text(value)):
        raise ValueError(f"{shown(value)} is no element type")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to 2^62")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{shown(value)} is no list")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is no mapping")
    return value
