"""Files whose contents already are token ids: .npy, .bin, and any file read as bytes.

Such files need no tokenizer, so they are mapped instead of loaded, and a data set may be larger than the memory. Mapping also
means that a wrong file would go unnoticed: every bit pattern is a valid id. Each file is therefore checked before it is
mapped. A .bin file must be a whole number of ids, and must not begin like another format (`headers.py`); the size of an .npy file must be
what its header promises.

The header of an .npy file is the text of a Python dict (numpy.lib.format). It is matched by a regular expression and never
evaluated, and arrays of Python objects, which numpy would unpickle, are refused: a data file cannot run code here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from jgt.document import InputError, shown

from .files import FileSet
from .headers import layout_of
from .mapped import MappedFile
from .stream import Segment, Stream

_MAP_BYTES = 1 << 24
# As numpy.lib.format: no real header comes near it.
_MAX_HEADER = 10_000
_FIELD = re.compile(
    r"""\s*['"](?P<key>descr|fortran_order|shape)['"]\s*:\s*"""
    r"""(?P<value>'[^'"\\]{0,40}'|"[^'"\\]{0,40}"|True|False|\((?:[0-9]{1,18}L?,\s*)*(?:[0-9]{1,18}L?)?\))\s*,?\s*"""
)
"""One entry of a header. The L is Python 2's mark of a long integer, which old files contain."""
_DTYPE = re.compile(r"[<>=|]?(?P<kind>[iu](?=[1248]$)|[bfc])(?P<width>[0-9]{1,2})")
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def open_bytes(files: FileSet) -> Stream:
    """The bytes of the files as token ids, uint8. Raises InputError if all files are empty."""
    if files.num_bytes == 0:
        raise InputError([f"{path}: the file is empty" for path in files.paths])
    return Stream(tuple(map(_bytes_of, files.paths)))


def _bytes_of(path: Path) -> Segment:
    # Linux allows a process some 65,000 mappings (vm.max_map_count), each of at least a page: small files are read instead.
    if (opened := path.stat()).st_size < _MAP_BYTES:
        return Segment(name=str(path), tokens=np.fromfile(path, np.uint8))
    return _mapped(path, opened, np.memmap(path, np.uint8, mode="r"))


def open_tokens(files: FileSet, dtype: str) -> Stream:
    """One segment per .npy or .bin file. Raises InputError with one problem per bad file.

    dtype: the type of the ids in .bin files that do not say it themselves. An .idx file only describes the .bin file beside it.
    """
    segments, problems = [], []
    # Every file is tried, so that all bad ones are reported at once.
    for path in (path for path in files.paths if path.suffix != ".idx"):
        try:
            segments.append(map_npy(path) if path.suffix == ".npy" else _map_described(path, dtype))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return Stream(tuple(segments))


def _map_described(path: Path, dtype: str) -> Segment:
    layout = layout_of(path, dtype)
    return map_bin(path, layout.dtype, layout.offset)


def map_bin(path: Path, dtype: str, offset: int = 0) -> Segment:
    """Maps a file of little-endian ids, which begin at the byte `offset`: [num_tokens]. Raises InputError."""
    opened, width = path.stat(), np.dtype(dtype).itemsize
    size = opened.st_size
    if size == 0:
        raise InputError([f"{path}: the file is empty"])
    if size % width:
        message = f"{path}: has {size} bytes, which is not a multiple of the {width} bytes of {dtype}"
        raise InputError([f"{message}. The file is cut short, or data.dtype is wrong"])
    return _mapped(path, opened, np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=offset))


def map_npy(path: Path) -> Segment:
    """Maps the one-dimensional integer array of an .npy file: [num_tokens]. Raises InputError."""
    opened = path.stat()
    size = opened.st_size
    if size == 0:
        raise InputError([f"{path}: the file is empty"])
    try:
        descr, shape, offset = _header(path)
    except _BadHeaderError as error:
        raise InputError([f"{path}: not a readable .npy file: {error}. Save one integer array with numpy.save"]) from None
    # A type that is not a plain number, such as a structure, has no match.
    dtype = _DTYPE.fullmatch(descr)
    if dtype is None or dtype["kind"] not in "iu" or len(shape) != 1:
        raise InputError([f"{path}: contains {_element_name(descr, dtype)} {list(shape)}. Token ids are integers with one dimension"])
    count, width = shape[0], int(dtype["width"])
    if count == 0:
        raise InputError([f"{path}: the file is empty: it contains no tokens"])
    if size != offset + count * width:
        message = f"{path}: its header promises {count} ids of {width} bytes, but {size - offset} bytes follow"
        raise InputError([f"{message}. The file is cut short, or contains more than one array"])
    return _mapped(path, opened, np.memmap(path, np.dtype(descr), mode="r", offset=offset, shape=(count,)))


def _mapped(path: Path, opened: os.stat_result, contents: np.memmap) -> Segment:
    """The segment of a mapped file. opened: its state before anything of it was read, so that a change meanwhile is noticed too."""
    # As a plain array: every slice of an np.memmap would be an np.memmap again, with bookkeeping of its own.
    tokens = contents.view(np.ndarray)
    return Segment(name=str(path), tokens=tokens, mapped=MappedFile(path, opened, tokens))


def _element_name(descr: str, dtype: re.Match[str] | None) -> str:
    """An element type as a user would write it: `float64` for `<f8`."""
    if dtype is None:
        return "Python objects" if descr == "|O" else shown(descr)
    return "bool" if dtype["kind"] == "b" else f"{_KINDS[dtype['kind']]}{8 * int(dtype['width'])}"


class _BadHeaderError(Exception):
    """The beginning of an .npy file cannot be read; the message says why."""


def _header(path: Path) -> tuple[str, tuple[int, ...], int]:
    """The element type, the shape, and the offset of the data in bytes. Raises _BadHeaderError.

    The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:6] != b"\x93NUMPY" or start[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
            raise _BadHeaderError("it does not begin like one")
        # Version 1 has two bytes for the length of the header, later ones four.
        length = int.from_bytes(file.read(2 if start[6] == 1 else 4), "little")
        if length > _MAX_HEADER:
            raise _BadHeaderError(f"its header has {length:,} bytes; at most {_MAX_HEADER:,} are read")
        text = file.read(length).decode("latin1")
        offset = file.tell()
    fields = _header_fields(text.strip())
    if fields.keys() != {"descr", "fortran_order", "shape"} or fields["descr"][0] not in "'\"" or fields["shape"][0] != "(":
        raise _BadHeaderError("its header does not describe an array of numbers")
    # A header in Fortran order needs no case of its own: one dimension has only one order.
    shape = tuple(int(number) for number in re.findall(r"[0-9]+", fields["shape"]))
    return fields["descr"].strip("'\""), shape, offset


def _header_fields(text: str) -> dict[str, str]:
    """The entries of a header as text; empty if the header contains anything else."""
    fields, position = {}, 1
    while match := _FIELD.match(text, position):
        fields[match["key"]] = match["value"]
        position = match.end()
    return fields if text[:1] == "{" and text[position:] == "}" else {}
