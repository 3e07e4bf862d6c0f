"""Files of token ids: .npy, and .bin without a header. Mapped, not loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jgt.document import InputError, shown
from train.data.files import FileSet
from train.data.stream import Segment, Stream

_MAX_HEADER = 10_000
_FIELD = re.compile(
    r"""\s*['"](?P<key>descr|fortran_order|shape)['"]\s*:\s*"""
    r"""(?P<value>'[^'"\\]{0,40}'|"[^'"\\]{0,40}"|True|False|\((?:[0-9]{1,18}L?,\s*)*(?:[0-9]{1,18}L?)?\))\s*,?\s*"""
)
_DTYPE = re.compile(r"[<>=|]?(?P<kind>[iu](?=[1248]$)|[bfc])(?P<width>[0-9]{1,2})")
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def open_tokens(files: FileSet, dtype: str) -> Stream:
    """A segment per file; `dtype` is that of the .bin files. Raises InputError with a problem per bad file."""
    segments, problems = [], []
    for path in files.paths:
        try:
            tokens = map_npy(path) if path.suffix == ".npy" else map_bin(path, dtype)
            segments.append(Segment(name=str(path), tokens=tokens))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return Stream(tuple(segments))


def map_bin(path: Path, dtype: str) -> np.ndarray:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise InputError([f"{path}: the file is empty"])
    if size % width:
        message = f"{path}: has {size} bytes, which is no multiple of the {width} bytes of {dtype}"
        raise InputError([f"{message}. The file is cut short, or data.dtype is wrong"])
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r").view(np.ndarray)


def map_npy(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size == 0:
        raise InputError([f"{path}: the file is empty"])
    try:
        descr, shape, offset = _header(path)
    except _BadHeaderError as error:
        raise InputError([f"{path}: not a readable .npy file: {error}. Save one integer array with numpy.save"]) from None
    dtype = _DTYPE.fullmatch(descr)
    if dtype is None or dtype["kind"] not in "iu" or len(shape) != 1:
        raise InputError([f"{path}: holds {_element(descr, dtype)} {list(shape)}. Token ids are integers with one dimension"])
    count, width = shape[0], int(dtype["width"])
    if count == 0:
        raise InputError([f"{path}: the file is empty: it holds no token"])
    if size != offset + count * width:
        message = f"{path}: its header speaks of {count} ids of {width} bytes, but {size - offset} bytes follow"
        raise InputError([f"{message}. The file is cut short, or holds more than one array"])
    return np.memmap(path, np.dtype(descr), mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def _element(descr: str, dtype: re.Match[str] | None) -> str:
    """What an element type is called."""
    if dtype is None:
        return "Python objects" if descr == "|O" else shown(descr)
    return "bool" if dtype["kind"] == "b" else f"{_KINDS[dtype['kind']]}{8 * int(dtype['width'])}"


class _BadHeaderError(Exception):
    """What is wrong with the beginning of an .npy file."""


def _header(path: Path) -> tuple[str, tuple[int, ...], int]:
    """Element type, shape and where the data begins. Raises _BadHeaderError.

    The format is that of numpy.lib.format. A header is Python's text of a dict, and is not evaluated here; nothing is unpickled.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:6] != b"\x93NUMPY" or start[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
            raise _BadHeaderError("it does not begin like one")
        length = int.from_bytes(file.read(2 if start[6] == 1 else 4), "little")
        if length > _MAX_HEADER:
            raise _BadHeaderError(f"its header has {length:,} bytes; at most {_MAX_HEADER:,} are read")
        text = file.read(length).decode("latin1")
        offset = file.tell()
    fields = _fields(text.strip())
    if fields.keys() != {"descr", "fortran_order", "shape"} or fields["descr"][0] not in "'\"" or fields["shape"][0] != "(":
        raise _BadHeaderError("its header is not that of an array of numbers")
    shape = tuple(int(number) for number in re.findall(r"[0-9]+", fields["shape"]))
    return fields["descr"].strip("'\""), shape, offset


def _fields(text: str) -> dict[str, str]:
    """The entries of a header; none when anything else stands there."""
    fields, place = {}, 1
    while match := _FIELD.match(text, place):
        fields[match["key"]] = match["value"]
        place = match.end()
    return fields if text[:1] == "{" and text[place:] == "}" else {}
