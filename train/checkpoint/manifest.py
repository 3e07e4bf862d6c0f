"""The manifest of a checkpoint: a list of its arrays, and of its files with their checksums. Needs neither JAX nor Orbax.

Orbax stores no checksums: a bit that flips on the disk comes back as another weight. So the manifest is written last, when all files are
complete, and read first, before any of them is used. A step is whole if it has exactly the files that its manifest lists, each with the
listed size and checksum.

A checkpoint may come from a stranger, so a manifest is read as hostile input: at most 64 MiB, JSON and never pickles, every number in
range, every path below the step's folder, no links, and no pipes or devices, which would block the reader. Whatever is wrong becomes one
BrokenError with one printable line. The invariant: a Manifest that `read` returns has the types that its fields declare. An error of the
disk is no verdict; it stays an OSError (see `train.checkpoint.disk`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from jgt.document import shown

from ..sections import MAX_BATCH
from .disk import kind, patiently, sync
from .signature import FIELD, Key

NAME = "manifest.json"
FORMAT = 1
FROZEN = "frozen"
"""The part of a state that may be left to a `Base`."""
_BLOCK = 1 << 22
_MAX_BYTES = 1 << 26
_MAX_NUMBER = 1 << 62
_MAX_PATH = 300
_MOST_OVERHEAD = 1 << 30
"""A step may have this many bytes of files more than twice the bytes of its arrays."""
# Every element type that JAX has. A list, because a name such as "O" would make numpy's dtype one of Python objects.
_DTYPE = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|b?float16|float(32|64)|complex(64|128)|float4_e2m1fn|"
    r"float8_(e3m4|e4m3|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
_OBJECTS = re.compile(r"[1-9][0-9]{0,9}-[0-9a-f]{1,16}-[0-9]{1,9}")
_KINDS = {str: "text", list: "a list", dict: "a mapping"}
_ODD_KINDS: Mapping[int | None, str] = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe, not a file",
    stat.S_IFSOCK: "a socket, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}
_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One array: its path, shape and element type."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its path below the step's folder, size in bytes, CRC-32 and, if `checkpoint.sha256` asks for it, SHA-256."""

    path: str
    size: int
    crc32: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Base:
    """A folder of published weights that holds the frozen parameters of a checkpoint. arrays: those parameters, as the state has them.

    sha256: the identity of its tensors (`train.weights.base`), wherever the folder is.
    """

    path: str
    sha256: str
    arrays: tuple[ArrayEntry, ...]


@dataclass(frozen=True, kw_only=True)
class ObjectsEntry:
    """Where a bucket has the arrays of a step (`train.checkpoint.objects`).

    folder: the folder of their objects. pieces: for each array the shape of the pieces into which it is cut. time: seconds since 1970.
    """

    folder: str
    pieces: tuple[tuple[int, ...], ...]
    time: float


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint after `step` updates.

    samples: sequences of training data consumed; mesh: axis sizes it was saved on; versions: by package; fingerprints: of config and data.
    phase: the steps since the last exchange of `sync`. base: where arrays are that `arrays` lacks. objects: in a bucket, where arrays are.
    """

    step: int
    samples: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    fingerprints: Mapping[str, Any]
    arrays: tuple[ArrayEntry, ...]
    files: tuple[FileEntry, ...]
    format: int = FORMAT
    phase: int = 0
    base: Base | None = None
    objects: ObjectsEntry | None = None


class BrokenError(Exception):
    """A step must not be used; the message says why."""


class UnsignedError(Exception):
    """A manifest is not signed with the run's key."""


def file_entries(folder: Path, *, sha256: bool) -> tuple[FileEntry, ...]:
    """An entry for each file of a step; reads every file once. Raises BrokenError for anything that is not a regular file."""
    with _readers() as readers:
        return tuple(readers.map(lambda path: _read_entry(folder, path, sha256=sha256), _files(folder)))


def write(folder: Path, manifest: Manifest, key: Key | None = None) -> None:
    """Writes the manifest, signed if there is a key. It is either complete or absent at any moment, and on disk when this returns."""
    path, new = folder / NAME, folder / f"{NAME}.new"
    values = as_json(manifest)
    # Orbax has its own files.
    del values["objects"]
    if key is not None:
        values[FIELD] = key.sign(values)
    with new.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        # Before the rename: a file system may put the name on disk before the content, and a power failure between would leave it empty.
        os.fsync(file.fileno())
    new.replace(path)
    sync(folder)


def as_json(manifest: Manifest) -> dict[str, Any]:
    """The values of a manifest as a reader will see them, because a signature covers the values that are read."""
    return json.loads(json.dumps(asdict(manifest)))


def read(folder: Path, key: Key | None = None) -> Manifest:
    """The manifest of a step. With a key it must be signed with it. Raises BrokenError, UnsignedError or OSError."""
    path = folder / NAME
    what = kind(path)
    if what is None:
        raise BrokenError(f"it has no {NAME}: it was never finished")
    if what != stat.S_IFREG:
        raise BrokenError(f"{NAME} is {_ODD_KINDS.get(what, 'a folder')}")
    if patiently(path.stat, path).st_size > _MAX_BYTES:
        raise BrokenError(f"{NAME} is damaged: the file is larger than {_MAX_BYTES:,} bytes")
    return parse(patiently(path.read_bytes, path), key)


def parse(content: bytes, key: Key | None = None) -> Manifest:
    """The manifest in a file or an object. Raises BrokenError or UnsignedError."""
    try:
        values = json.loads(content)
        if problem := None if key is None else key.problem(_check_kind(dict, values)):
            raise UnsignedError(problem)
        return _parse(values)
    except RecursionError:
        raise BrokenError(f"{NAME} is damaged: it is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenError(f"{NAME} is damaged: {shown(f'{type(error).__name__}: {error}', _MAX_PATH, quotes=False)}") from None


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
    return shown(path, _MAX_PATH, quotes=False)


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
                raise BrokenError(f"{name} is {_ODD_KINDS.get(what, 'no longer there')}")
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


# `jgt.document.bind` would refuse the unknown keys of a newer version, and takes eight times as long (22,000 entries: 3.9 s).
def _parse(values: Any) -> Manifest:
    """Raises KeyError, TypeError, ValueError or AttributeError for anything that is not a manifest."""
    if type(_check_kind(dict, values).get("format")) is not int or values["format"] != FORMAT:
        raise ValueError(f"format {shown(values.get('format'))}, not {FORMAT}")
    step, samples = _number(values["step"]), _number(values["samples"])
    if samples > step * MAX_BATCH:
        raise ValueError(f"{step} steps cannot consume {samples} samples")
    arrays = tuple(map(_array_entry, _check_kind(list, values["arrays"])))
    files = tuple(map(_file_entry, _check_kind(list, values["files"])))
    # A sparse file of any size costs its maker nothing, and a checksum of it hours.
    size, most = sum(file.size for file in files), _MOST_OVERHEAD + 2 * sum(map(_num_bytes, arrays))
    if size > most:
        raise ValueError(f"its files have {size:,} bytes, but its arrays need at most {most:,}")
    return Manifest(
        step=step,
        samples=samples,
        mesh={axis: _number(size) for axis, size in _check_kind(dict, values["mesh"]).items()},
        versions={name: _check_kind(str, version) for name, version in _check_kind(dict, values["versions"]).items()},
        fingerprints=_check_kind(dict, values["fingerprints"]),
        arrays=arrays,
        files=files,
        phase=_number(values.get("phase", 0)),
        base=None if values.get("base") is None else _base(_check_kind(dict, values["base"])),
        objects=None if values.get("objects") is None else _objects(_check_kind(dict, values["objects"]), arrays),
    )


def _objects(values: Mapping[str, Any], arrays: tuple[ArrayEntry, ...]) -> ObjectsEntry:
    folder, pieces, time = _check_kind(str, values["folder"]), _check_kind(list, values["pieces"]), values["time"]
    shapes = tuple(tuple(map(_number, _check_kind(list, shape))) for shape in pieces)
    if not _OBJECTS.fullmatch(folder) or type(time) not in (int, float):
        raise ValueError(f"{shown(folder)} is not a folder of objects")
    if len(shapes) != len(arrays) or any(len(a.shape) != len(p) or 0 in p for a, p in zip(arrays, shapes, strict=True)):
        raise ValueError("the pieces of its arrays have other shapes")
    return ObjectsEntry(folder=folder, pieces=shapes, time=float(time))


def _base(values: Mapping[str, Any]) -> Base:
    path, sha256 = (_check_kind(str, values[key]) for key in ("path", "sha256"))
    arrays = tuple(map(_array_entry, _check_kind(list, values["arrays"])))
    if odd := [array.path for array in arrays if not array.path.startswith(f"{FROZEN}/")]:
        raise ValueError(f"{shown(odd[0])} is not a frozen parameter")
    return Base(path=path, sha256=sha256, arrays=arrays)


def _array_entry(values: Any) -> ArrayEntry:
    path, dtype = (_check_kind(str, values[key]) for key in ("path", "dtype"))
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"{shown(dtype)} is not an element type")
    return ArrayEntry(path=path, shape=tuple(map(_number, _check_kind(list, values["shape"]))), dtype=dtype)


def _num_bytes(array: ArrayEntry) -> int:
    bits = re.search(r"\d+", array.dtype)
    # Types of less than a byte are stored in one.
    return math.prod(array.shape) * max(8, int(bits[0]) if bits else 8) // 8


def _file_entry(values: Any) -> FileEntry:
    path, sha256 = _check_kind(str, values["path"]), values.get("sha256")
    parts = Path(path).parts
    if not parts or Path(path).is_absolute() or ".." in parts or len(path) > _MAX_PATH:
        raise ValueError(f"the path {shown(path)} leads outside, or is too long")
    return FileEntry(
        path=path,
        size=_number(values["size"]),
        crc32=_number(values["crc32"]),
        sha256=None if sha256 is None else _check_kind(str, sha256),
    )


def _number(value: Any) -> int:
    # `type`, because isinstance would accept true and false.
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to 2^62")
    return value


def _check_kind(kind: type[_Kind], value: Any) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)} is not {_KINDS[kind]}")
    return value
