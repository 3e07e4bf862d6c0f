"""Files of token ids: .npy, and .bin without a header. Mapped, not loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jgt.document import InputError
from train.data.files import FileSet
from train.data.stream import Segment, Stream


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
    if path.stat().st_size == 0:
        raise InputError([f"{path}: the file is empty"])
    try:
        # Unlike np.load, this reads nothing but .npy, and therefore no pickle and no archive.
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError, TypeError, EOFError) as error:
        raise InputError([f"{path}: not a readable .npy file: {error}. Save one integer array with numpy.save"]) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError([f"{path}: holds {tokens.dtype} {list(tokens.shape)}. Token ids are integers with one dimension"])
    if not len(tokens):
        raise InputError([f"{path}: the file is empty: it holds no token"])
    return tokens.view(np.ndarray)
