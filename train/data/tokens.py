"""Files whose contents already are token ids: .npy, .bin, and any file read as bytes.

Such files need no tokenizer, so they are mapped instead of loaded, and a data set may be larger than the memory. Mapping also means that a
wrong file would go unnoticed: every bit pattern is a valid token id, and every byte is one to the byte tokenizer. Each file is therefore
checked before it is mapped. The size of an .npy file must be what its header promises, and a .bin file must be a whole number of ids. A
.bin file whose layout is known is read by that layout: a header of llm.c (and modded-nanogpt) gives the type and number of the ids, and so
does Megatron's index, the .idx file beside it. Any other file that begins like a known format is refused, with what to do instead.

llm.c: 256 int32 (magic, version, number of ids), then the ids (https://github.com/karpathy/llm.c, dev/data/data_common.py).
Megatron: https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.

A data file cannot run code here: numpy reads the header of an .npy file as a literal, and arrays of Python objects, which it would
unpickle, are refused.
"""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from jgt.document import InputError, shown

from .files import FileSet
from .mapped import MappedFile
from .stream import Segment, Stream

_MAP_BYTES = 1 << 24
# As numpy.lib.format: no real header comes near it.
_MAX_HEADER = 10_000
_PROBE_BYTES = 16
_LLM_C_HEADER = 256 * 4
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
_LLM_C_OTHER = (20240326, 20240327, 20240522)
"""The magic numbers of llm.c's models, and of its questions with several answers."""
_INDEX = re.compile(rb"(MMIDIDX|TNTIDX)\0\0")
_INDEX_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FORMATS = (
    (re.compile(rb"\x93NUMPY"), "a .npy file", "End its name in .npy and set data.source=tokens"),
    (re.compile(rb"PAR1"), "a Parquet file", "Set data.source=parquet"),
    (re.compile(rb"ARROW1"), "an Arrow file", "Set data.source=arrow"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "Zstandard data", "End its name in .zst if it is packed text; otherwise unpack it"),
    (re.compile(rb"\x1f\x8b\x08[\0-\x1f]"), "gzip data", "End its name in .gz if it is packed text; otherwise unpack it"),
    (re.compile(rb"PK\x03\x04"), "a zip archive", "Unpack it"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bzip2 data", "Unpack it"),
    (re.compile(rb"\xfd7zXZ\0"), "xz data", "Unpack it"),
    (_INDEX, "an index of Megatron's", "Name the .bin file beside it and set data.source=tokens"),
)


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


def format_problem(path: Path) -> str | None:
    """Why a file that begins like a known format cannot be read as text or ids; None for any other file."""
    start = _first_bytes(path)
    for pattern, what, remedy in _FORMATS:
        if pattern.match(start):
            return f"{path}: begins like {what}. {remedy}"
    return None


def layout_of(path: Path, dtype: str) -> tuple[str, int]:
    """The type of the ids in a .bin file, `dtype` if the file does not say, and the offset of the first one. Raises InputError."""
    if problem := format_problem(path):
        raise InputError([problem])
    index = path.with_suffix(".idx")
    if index.is_file() and _INDEX.match(_first_bytes(index)):
        return _megatron_type(path, index), 0
    start = _first_bytes(path)
    magic, version, count = struct.unpack("<3i", start[:12]) if len(start) >= 12 else (0, 0, 0)
    if magic in _LLM_C_OTHER:
        raise InputError([f"{path}: begins like a file of llm.c that has no tokens (magic {magic})"])
    if magic not in _LLM_C:
        return dtype, 0
    width, size = np.dtype(_LLM_C[magic]).itemsize, path.stat().st_size - _LLM_C_HEADER
    if size != count * width:
        message = f"its header of llm.c (magic {magic}, version {version}) promises {count:,} ids of {width} bytes"
        remedy = "The file is cut short or, if these are ids without a header, should be an .npy file"
        raise InputError([f"{path}: {message}, but {max(size, 0):,} bytes follow. {remedy}"])
    if count == 0:
        raise InputError([f"{path}: the file is empty: it contains no tokens"])
    return _LLM_C[magic], _LLM_C_HEADER


def _megatron_type(path: Path, index: Path) -> str:
    """The type of the ids in the .bin file of an index. The ids of its documents follow each other without gaps."""
    with index.open("rb") as file:
        header = file.read(34)
        version, code, sequences = struct.unpack("<QBQ", header[9:26]) if len(header) == 34 and header.startswith(b"MM") else (0, 0, 0)
        # The number is not trusted: a wrong one must not allocate memory.
        lengths = np.fromfile(file, "<i4", min(sequences, index.stat().st_size // 4))
    dtype = _INDEX_TYPES.get(code)
    if version != 1 or dtype is None or len(lengths) != sequences or (lengths < 0).any():
        wrong = f"is not an index of token ids of Megatron from 2020 or later, or is cut short or damaged (version {version}, type {code})"
        raise InputError([f"{index}: {wrong}. Write it again"])
    count, width, size = int(lengths.sum(dtype=np.int64)), np.dtype(dtype).itemsize, path.stat().st_size
    if size != count * width:
        promised = f"its index {index} promises {count:,} ids of {width} bytes"
        raise InputError([f"{path}: has {size:,} bytes, but {promised}. One of them is cut short"])
    return dtype


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_PROBE_BYTES)
