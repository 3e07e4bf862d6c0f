"""Files whose contents already are token ids: .npy, .bin, and any file read as bytes.

Such files need no tokenizer, so they are mapped instead of loaded, and a data set may be larger than the memory. Mapping also means that a
wrong file would go unnoticed: every bit pattern is a valid id. Each file is therefore checked before it is mapped. A .bin file must be a
whole number of ids, and must not begin like another format (`headers.py`); the size of an .npy file must be what its header promises.

A data file cannot run code here: numpy reads the header of an .npy file as a literal, and arrays of Python objects, which it would
unpickle, are refused.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from jgt.document import InputError, shown

from .files import FileSet
from .headers import layout_of
from .mapped import MappedFile
from .stream import Segment, Stream

_MAP_BYTES = 1 << 24
# As numpy.lib.format: no real header comes near it.
_MAX_HEADER = 10_000


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
            segments.append(map_npy(path) if path.suffix == ".npy" else map_bin(path, *layout_of(path, dtype)))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return Stream(tuple(segments))


def map_bin(path: Path, dtype: str, offset: int = 0) -> Segment:
    """Maps a file of little-endian ids, which begin at the byte `offset`: [num_tokens]. Raises InputError."""
    opened, width = _opened(path), np.dtype(dtype).itemsize
    if opened.st_size % width:
        message = f"{path}: has {opened.st_size} bytes, which is not a multiple of the {width} bytes of {dtype}"
        raise InputError([f"{message}. The file is cut short, or data.dtype is wrong"])
    return _mapped(path, opened, np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=offset))


def map_npy(path: Path) -> Segment:
    """Maps the one-dimensional integer array of an .npy file: [num_tokens]. Raises InputError."""
    opened = _opened(path)
    shape, dtype, offset = _header(path)
    if dtype.kind not in "iu" or len(shape) != 1:
        what = "Python objects" if dtype.hasobject else dtype.name if dtype.kind in "biufc" else shown(dtype.str)
        raise InputError([f"{path}: contains {what} {list(shape)}. Token ids are integers with one dimension"])
    (count,) = shape
    if count == 0:
        raise InputError([f"{path}: the file is empty: it contains no tokens"])
    if opened.st_size != offset + count * dtype.itemsize:
        message = f"{path}: its header promises {count} ids of {dtype.itemsize} bytes, but {opened.st_size - offset} bytes follow"
        raise InputError([f"{message}. The file is cut short, or contains more than one array"])
    return _mapped(path, opened, np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


def _opened(path: Path) -> os.stat_result:
    """The state of a file before anything of it is read, so that a change meanwhile is noticed too. Raises InputError if it is empty."""
    opened = path.stat()
    if opened.st_size == 0:
        raise InputError([f"{path}: the file is empty"])
    return opened


def _mapped(path: Path, opened: os.stat_result, contents: np.memmap) -> Segment:
    # As a plain array: every slice of an np.memmap would be an np.memmap again, with its own bookkeeping.
    tokens = contents.view(np.ndarray)
    return Segment(name=str(path), tokens=tokens, mapped=MappedFile(path, opened))


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    """The shape and the element type in the header of an .npy file, and the offset of the data in bytes. Raises InputError."""
    with path.open("rb") as file:
        # A forged length of the header must not be read.
        start = io.BytesIO(file.read(_MAX_HEADER + npy.MAGIC_LEN + 4))
    problem = "it does not begin like one"
    # numpy warns of long integers (20L), which Python 2 has written.
    with warnings.catch_warnings(action="ignore"):
        try:
            if (version := npy.read_magic(start)) in ((1, 0), (2, 0), (3, 0)):
                problem = f"its header does not describe an array of numbers within {_MAX_HEADER:,} bytes"
                # Version 3 differs from 2 in the names of fields alone.
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(start, max_header_size=_MAX_HEADER)
                if dtype.names is None and all(0 <= size < 1 << 62 for size in shape):
                    return tuple(map(int, shape)), dtype, start.tell()
        # The literal of a stranger fails in many ways.
        except Exception:
            pass
    raise InputError([f"{path}: not a readable .npy file: {problem}. Save one integer array with numpy.save"])
