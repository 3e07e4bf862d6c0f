"""Writing a folder of safetensors files that transformers can load, piece by piece.

Names, types and shapes are known before the first value, so each file begins with its whole header. Then each piece of a tensor is
written to its place, in whatever order pieces come, and never more than one of them is in memory. The folder is whole or absent wherever
the process is killed: it is written below another name, `NAME.writing`, which the next writer of the same folder empties, and renamed when
all of it is on disk. Needs no JAX.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jgt.document import InputError

from ..checkpoint.steps import remove
from ..files.disk import sync, sync_above, sync_tree
from ..files.locks import lock
from .foreign import METADATA
from .safetensors import DTYPES, INDEX, SINGLE, Folder, open_folder, runs, spans

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Piece = tuple[str, Sequence[slice], np.ndarray]
"""A part of a tensor: the tensor's name, a slice for each of its first dims, and the elements there."""


def write_folder(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype, Sequence[int]]],
    pieces: Iterable[Piece],
    *,
    files: Mapping[str, bytes | Path],
    max_file_bytes: int,
    single: str = SINGLE,
    last: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a new folder with these tensors and other files. An error leaves nothing.

    tensors: type and shape of each tensor, in the order in which the files are filled. pieces: each element of them once, in any order.
    files: contents, or files to copy, by name. max_file_bytes: tensors in one file, but for a single tensor that is larger. single: the
    name of the file, where one is enough. last: gets the folder in which all files are complete, before it has its name.
    Raises InputError if there is something at the path, ValueError for other pieces than `tensors` says, and OSError.
    """
    with _whole_folder(path) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, folder / name)
        _write_headers(folder, tensors, max_file_bytes, single)
        written = open_folder(folder, single=single)
        missing = {name: math.prod(place.shape) for name, place in written.tensors.items()}
        for name, slices, array in pieces:
            _write(written, name, slices, array)
            missing[name] -= array.size
        if wrong := [name for name, count in missing.items() if count]:
            raise ValueError(f"not every element once of {', '.join(wrong)}")
        last(folder)


@contextlib.contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder that gets its name when the block ends without an error."""
    path = path.absolute()
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise InputError([f"{path}: is there already. Name another folder, or remove it"])
    writing = path.with_name(f"{path.name}.writing")
    writing.mkdir(parents=True, exist_ok=True)
    with _locked(writing):
        try:
            for left in writing.iterdir():
                remove(left)
            yield writing
            sync_tree(writing)
            # Replaces an empty folder, and fails for one that was filled in the meantime.
            writing.rename(path)
        except BaseException as error:
            # Otherwise a full disk would stay full.
            with contextlib.suppress(OSError):
                remove(writing)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise
    sync(path.parent)
    sync_above(path.parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder, where its file system has locks. The kernel releases it when the process dies."""
    number = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        is_ours = True
        with contextlib.suppress(OSError):
            is_ours = lock(number)
        if not is_ours:
            raise InputError([f"{folder}: another process is writing it. Name another folder, or wait until it ends"])
        yield
    finally:
        os.close(number)


def _write_headers(folder: Path, tensors: Mapping[str, tuple[np.dtype, Sequence[int]]], most: int, single: str) -> None:
    """Writes each file with zeros for its tensors, and the index of several files."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    parts, places = _parts(sizes, most), dict[str, str]()
    for number, part in enumerate(parts, 1):
        file = single if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        header: dict[str, object] = {METADATA: {"format": "pt"}}
        end = 0
        # The widest types first, so that each tensor is aligned.
        for name in sorted(part, key=lambda name: -tensors[name][0].itemsize):
            dtype, shape = tensors[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
        places |= dict.fromkeys(part, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _parts(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The tensors of each file."""
    parts: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if parts[-1] and total + size > most:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    return parts


def _write(folder: Folder, name: str, slices: Sequence[slice], array: np.ndarray) -> None:
    place = folder.tensors[name]
    part = spans(place, slices)
    if (array.dtype, array.shape) != (place.dtype, tuple(map(len, part))):
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {place.dtype}{list(map(len, part))}")
    if not array.size:
        return
    if part[-1:] and part[-1].step != 1:
        # What is between stays as it is.
        part[-1], step = range(part[-1].start, part[-1].stop), part[-1].step
        between = folder.read(name, [slice(span.start, span.stop, span.step) for span in part])
        between[..., ::step] = array
        array = between
    view, (begins, size) = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, runs(place, part)
    with place.file.open("r+b") as file:
        for at, begin in zip(range(0, len(view), size), begins, strict=True):
            run, offset = view[at : at + size], begin
            # The system writes at most 2 GiB at once.
            while run:
                count = os.pwrite(file.fileno(), run, offset)
                run, offset = run[count:], offset + count
