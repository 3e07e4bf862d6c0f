"""The manifest of a checkpoint, written and read: its arrays, and its files with their checksums. Needs neither JAX nor Orbax.

Orbax stores no checksums: a bit that flips on the disk comes back as another weight. So the manifest is written last, when all files are
complete, and read first, before any of them is used. `train.checkpoint.contents` compares the files with it.

A checkpoint may come from a stranger, so a manifest is read as hostile input: at most 64 MiB, JSON and never pickles, every number in
range, every path below the step's folder, no links, and no pipes or devices, which would block the reader. Whatever is wrong becomes one
BrokenError with one printable line. The invariant: a Manifest that `read` returns has the types that its fields declare. A failing disk
does not make a step broken: its error stays an OSError (see `train.files.disk`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from jgt.document import shown

from ..files.disk import kind, patiently, replaced, sync
from ..files.json_text import NestedError, json_value
from ..settings.numbers import MAX_BATCH
from .listing import FORMAT, ArrayEntry, Base, FileEntry, Kept, Manifest, ObjectsEntry
from .signature import FIELD, Key

NAME = "manifest.json"
_CHECKSUM = "crc32"
_UNSEALED = 1
"""The format of earlier versions, whose manifests have no checksum of their own."""
FROZEN = "frozen"
"""The part of a state that may be left to a `Base`."""
_MAX_BYTES = 1 << 26
_MAX_NUMBER = 1 << 62
MAX_PATH = 300
_MOST_OVERHEAD = 1 << 30
"""A step may have this many bytes of files more than twice the bytes of its arrays."""
# Every element type that JAX has. A list, because a name such as "O" would make numpy's dtype one of Python objects.
_DTYPE = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|b?float16|float(32|64)|complex(64|128)|float4_e2m1fn|"
    r"float8_(e3m4|e4m3|e4m3b11fnuz|e4m3fn|e4m3fnuz|e5m2|e5m2fnuz|e8m0fnu)"
)
_OBJECTS = re.compile(r"[1-9][0-9]{0,9}-[0-9a-f]{1,16}-[0-9]{1,9}")
_KINDS = {str: "text", list: "a list", dict: "a mapping"}
ODD_KINDS: Mapping[int | None, str] = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe, not a file",
    stat.S_IFSOCK: "a socket, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}
_Kind = TypeVar("_Kind", str, list[Any], dict[str, Any])


class BrokenError(Exception):
    """A step must not be used; the message says why."""


class UnsignedError(Exception):
    """A manifest is not signed with the run's key."""


def write(folder: Path, manifest: Manifest, key: Key | None = None) -> None:
    """Writes the manifest, signed if there is a key. It is either complete or absent at any moment, and on disk when this returns."""
    values = sealed(as_json(manifest))
    if key is not None:
        values[FIELD] = key.sign(values)
    with replaced(folder / NAME, is_of_run=True) as new, new.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        # Before the rename: a file system may put the name on disk before the content, and a power failure between would leave it empty.
        os.fsync(file.fileno())
    sync(folder)


def as_json(manifest: Manifest) -> dict[str, object]:
    """The values of a manifest as a reader will see them, because a signature covers the values that are read."""
    values = json.loads(json.dumps(asdict(manifest)))
    # Orbax has its own files.
    return {name: value for name, value in values.items() if name != "objects" or value is not None}


def digest(manifest: Manifest) -> str:
    """A SHA-256 of all that a manifest says, and so of the checksums of its files."""
    return hashlib.sha256(json.dumps(as_json(manifest), sort_keys=True).encode()).hexdigest()


def sealed(values: Mapping[str, object]) -> dict[str, object]:
    """The values with a checksum of all of them but the signature. Without it, a bit that flips in a number would be another number."""
    return {**values, _CHECKSUM: _checksum(values)}


def _checksum(values: Mapping[str, object]) -> int:
    others = {name: value for name, value in values.items() if name not in (_CHECKSUM, FIELD)}
    return zlib.crc32(json.dumps(others, sort_keys=True, separators=(",", ":")).encode())


def read(folder: Path, key: Key | None = None) -> Manifest:
    """The manifest of a step. With a key it must be signed with it. Raises BrokenError, UnsignedError or OSError."""
    path = folder / NAME
    what = kind(path)
    if what is None:
        raise BrokenError(f"it has no {NAME}: it was never finished")
    if what != stat.S_IFREG:
        raise BrokenError(f"{NAME} is {ODD_KINDS.get(what, 'a folder')}")
    if patiently(path.stat, path).st_size > _MAX_BYTES:
        raise BrokenError(f"{NAME} is damaged: the file is larger than {_MAX_BYTES:,} bytes")
    return parse(patiently(path.read_bytes, path), key)


def parse(content: bytes, key: Key | None = None) -> Manifest:
    """The manifest in a file or an object. Raises BrokenError or UnsignedError."""
    try:
        values = _check_kind(dict, json_value(content))
        if problem := None if key is None else key.problem(values):
            raise UnsignedError(problem)
        if values.get("format") == FORMAT and values[_CHECKSUM] != _checksum(values):
            raise BrokenError(f"{NAME} has other content than was written (checksum)")
        return _parse(values)
    except (NestedError, RecursionError):
        raise BrokenError(f"{NAME} is damaged: it is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BrokenError(f"{NAME} is damaged: {shown(f'{type(error).__name__}: {error}', MAX_PATH, quotes=False)}") from None


# `jgt.document.bind` would refuse the unknown keys of a newer version, and takes eight times as long (22,000 entries: 3.9 s).
def _parse(values: Mapping[str, object]) -> Manifest:
    """Raises KeyError, TypeError, ValueError or AttributeError for anything that is not a manifest."""
    if type(values.get("format")) is not int or values["format"] not in (_UNSEALED, FORMAT):
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
        kept=Kept() if "kept" not in values else _kept(_check_kind(dict, values["kept"])),
    )


def _kept(values: Mapping[str, Any]) -> Kept:
    by_metric = _check_kind(dict, values["evaluations"])
    lists = {name: _check_kind(list, pairs) for name, pairs in by_metric.items()}
    evaluations = {name: tuple((_number(step), None if x is None else float(x)) for step, x in pairs) for name, pairs in lists.items()}
    return Kept(id=_check_kind(str, values["id"]), evaluations=evaluations, reference=_check_kind(dict, values["reference"]))


def _objects(values: Mapping[str, Any], arrays: tuple[ArrayEntry, ...]) -> ObjectsEntry:
    folder, pieces, time = _check_kind(str, values["folder"]), _check_kind(list, values["pieces"]), values["time"]
    shapes = tuple(tuple(map(_number, _check_kind(list, shape))) for shape in pieces)
    if not _OBJECTS.fullmatch(folder) or type(time) not in (int, float):
        raise ValueError(f"{shown(folder)} is not a folder of objects")
    if len(shapes) != len(arrays) or any(len(a.shape) != len(p) or 0 in p for a, p in zip(arrays, shapes, strict=True)):
        raise ValueError("the pieces of its arrays have other shapes")
    return ObjectsEntry(folder=folder, pieces=shapes, time=float(time))


def _base(values: Mapping[str, object]) -> Base:
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
    if not parts or Path(path).is_absolute() or ".." in parts or len(path) > MAX_PATH:
        raise ValueError(f"the path {shown(path)} leads outside, or is too long")
    return FileEntry(
        path=path,
        size=_number(values["size"]),
        crc32=_number(values["crc32"]),
        sha256=None if sha256 is None else _check_kind(str, sha256),
    )


def _number(value: object) -> int:
    # `type`, because isinstance would accept true and false.
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to 2^62")
    return value


def _check_kind(kind: type[_Kind], value: object) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{shown(value)} is not {_KINDS[kind]}")
    return value
