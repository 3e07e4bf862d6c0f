"""Known formats, recognised by a file's first bytes where its name alone would mislead.

Every bit pattern is a valid token id, and every byte is one to the byte tokenizer. So a file of another format would be read without an
error, its header and its packed contents as tokens, and the run would only learn badly. Two rules prevent it. A .bin file whose layout is
known is read by that layout: a header of llm.c (and modded-nanogpt) gives the type and number of the ids, and so does Megatron's index, the
.idx file beside it. Any other file that begins like a known format is refused, with what to do instead.

llm.c: 256 int32 (magic, version, number of ids), then the ids (https://github.com/karpathy/llm.c, dev/data/data_common.py).
Megatron: https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np

from jgt.document import InputError

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
