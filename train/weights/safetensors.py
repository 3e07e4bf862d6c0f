"""A folder of safetensors files, as Hugging Face publishes weights: the tensors in it, and any part of each.

A file is the length of its header in 8 bytes, the header, and the bytes of all tensors. The header is JSON: type, shape, first and last
byte of each tensor by name (https://github.com/huggingface/safetensors#format). Several files have an index, which is JSON too.

A folder may come from a stranger. Everything that it says about itself is checked before the first tensor is read, and every length is
bounded. The invariants: no file outside of the folder is read, nothing in the folder is executed, and every byte behind a header belongs to
exactly one tensor. Tensors are read with pread and not mapped: the pages of a mapped file count as memory of the process, and a mapped file
that is cut short kills it. Needs no JAX.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jgt.document import InputError, read_bytes, shown

from ..files.disk import DiskError, describe, open_file, patiently
from .foreign import METADATA, PICKLES, first, inside, parse_json, problems_at, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_INTEGERS = {"BOOL": "bool"} | {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)}
_FLOATS = {"F16": "float16", "BF16": ml_dtypes.bfloat16, "F32": "float32", "F64": "float64"}
_EIGHTS = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"} | {
    f"F8_{kind.upper()}": f"float8_{kind}" for kind in ("e5m2", "e4m3fnuz", "e5m2fnuz")
}
DTYPES: Mapping[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in (_INTEGERS | _FLOATS | {"C64": "complex64"} | _EIGHTS).items()}
"""The element types by their names in a header, without F4 and F6, whose elements share bytes."""
PARAMETERS = {name: DTYPES[name] for name in _FLOATS}
"""The types of tensors that are parameters as they are. Others are parts of quantised ones."""
# All files of the largest published models together have 210,000 tensors.
_MAX_INDEX, _MAX_TENSORS = 1 << 26, 400_000
_MAX_DIMS, _MAX_NUMBER, _MAX_OTHERS = 32, 1 << 62, 1_000
_FILE = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One array of a file. offset: its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The tensors of all files of a folder, by name."""

    path: Path
    tensors: Mapping[str, Tensor]

    def read(self, name: str, slices: Sequence[slice] = ()) -> np.ndarray:
        """A part of a tensor in new memory. Reads exactly the bytes of this part. Raises DiskError.

        slices: a slice forward for each dim; dims behind the last one are read whole. Of a tensor's last dim with a step, what is between
        is read, too: an element alone would take as long as a thousand.
        """
        tensor = self.tensors[name]
        place = spans(tensor, slices)
        if any(span.step < 1 for span in place):
            raise ValueError(f"{name}: a slice goes backward: {slices}")
        if place and place[-1].step != 1:
            return self.read(name, (*slices[:-1], slice(place[-1].start, place[-1].stop)))[..., :: place[-1].step]
        # Never a buffer that was used before: `jax.device_put` may keep the memory that it is given.
        part = np.empty([len(span) for span in place], tensor.dtype)
        if not part.size:
            return part
        begins, size = runs(tensor, place)
        # Of any type, because the types of Python 3.11 do not know that arrays are buffers.
        rows: Any = part.reshape(-1).view(np.uint8).reshape(-1, size)
        preadv = os.preadv

        def read() -> None:
            with open_file(tensor.file) as file:
                number = file.fileno()
                # A run costs about 1 us beside its bytes: 1 KiB of each row is read at 1 GB/s. So nothing else is in this loop.
                for row, begin in zip(rows, begins, strict=True):
                    if (count := preadv(number, (row,), begin)) != size:
                        _fill(number, row.data[count:], begin + count)

        try:
            patiently(read, tensor.file)
        except OSError as error:
            raise DiskError(f"{describe(error, tensor.file)} ({shown(name)})") from error
        return part


def check_finite(part: np.ndarray, file: Path, name: str) -> None:
    """Raises InputError for a part of a tensor with numbers that no training goes on from."""
    if not np.isfinite(part).all():
        why = "has NaN or infinite numbers: its file is damaged, or its training had failed"
        raise InputError([f"{file}: {name}: {why}. Take another copy, or another model"])


def spans(tensor: Tensor, slices: Sequence[slice]) -> list[range]:
    """The elements of a part in each dim. slices: as for `Folder.read`."""
    cuts = (*slices, *(slice(None) for _ in tensor.shape[len(slices) :]))
    return [range(size)[cut] for size, cut in zip(tensor.shape, cuts, strict=True)]


def runs(tensor: Tensor, part: Sequence[range]) -> tuple[list[int], int]:
    """Where in the file each run of neighbouring bytes of a part begins, and the bytes of a run."""
    steps = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(part))]
    # Dims behind the last one that is cut are read whole. Of one with a step no two elements are neighbours.
    last = max((dim + (span.step != 1) for dim, span in enumerate(part) if len(span) < tensor.shape[dim]), default=0)
    begins = np.array([sum(span.start * step for span, step in zip(part, steps, strict=True))])
    for span, step in zip(part[:last], steps[:last], strict=True):
        begins = (begins[:, None] + np.arange(len(span)) * span.step * step).ravel()
    size = math.prod(len(span) for span in part[last:])
    return (tensor.offset + begins * tensor.dtype.itemsize).tolist(), size * tensor.dtype.itemsize


def _fill(file: int, view: memoryview, offset: int) -> None:
    """Reads the rest of a run."""
    # The system reads at most 2 GiB at once.
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError(errno.EIO, "the file became shorter after it was opened")
        view, offset = view[count:], offset + count


def open_folder(path: str | Path, most: int = _MAX_TENSORS, single: str = SINGLE) -> Folder:
    """The folder with `model.safetensors`, or with an index and its files; the first if there are both, as in transformers.

    most: the limit of the number of tensors. single: the name of a file without an index. Raises InputError with everything that is wrong,
    by file and tensor.
    """
    folder = Path(path)
    with problems_at(folder):
        files = _promised(folder, most, single)
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, promised in files.items():
        with InputError.collect(problems):
            found = _read_file(folder, name, most - len(tensors))
            twice, lost = sorted(found.keys() & tensors.keys()), sorted(promised - found.keys())
            problems += [f"{folder / name}: {_text(x)}: is also in {tensors[x].file.name}. A tensor has one file" for x in twice]
            problems += [f"{folder / INDEX}: {_text(x)}: is not in {name}, as the index says. Fetch both again" for x in lost]
            tensors |= found
    if problems:
        raise InputError(problems)
    return Folder(path=folder, tensors=tensors)


def _promised(folder: Path, most: int, single: str) -> Mapping[str, set[str]]:
    """The files with tensors, each with the tensors that the index promises there."""
    if os.path.lexists(folder / single):
        return {single: set()}
    if not os.path.lexists(place := folder / INDEX):
        pickle = next((f", only {shown(entry.name)}, a pickle" for entry in folder.iterdir() if entry.suffix in PICKLES), "")
        raise InputError([f"{folder}: has neither {single} nor {INDEX}{pickle}. Convert the weights to safetensors where you trust them"])
    with problems_at(place):
        data = read_bytes(inside(folder, INDEX), _MAX_INDEX)
        _check_count(data, 1, most)
        files = parse_json(data).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError(f"weight_map: is not a mapping of tensors to their files, but {shown(files)}")
    if wrong := [(name, file) for name, file in files.items() if not (isinstance(file, str) and _FILE.fullmatch(file))]:
        allowed = "Allowed is the name of a .safetensors file in the folder"
        raise InputError(first(f"{place}: {_text(name)}: its file is {shown(file)}. {allowed}" for name, file in wrong))
    promised: dict[str, set[str]] = {}
    for name, file in files.items():
        promised.setdefault(file, set()).add(name)
    return promised


def _check_count(data: bytes, colons: int, most: int) -> None:
    """Refuses JSON with too many tensors, each of which has so many colons. Names hardly have any."""
    # Counting takes a thousandth of the time of parsing.
    if (count := (data.count(b":") - _MAX_OTHERS) // colons) > most:
        raise ValueError(f"has at least {count:,} tensors, which is more than the limit of {most:,}")


def _read_file(folder: Path, name: str, most: int) -> dict[str, Tensor]:
    """The tensors of one file, which has at most `most`. Raises InputError."""
    file, place = inside(folder, name), folder / name
    with problems_at(place):
        text, start, size = patiently(lambda: read_header(file), file)
        _check_count(text, 4, most)
        entries = parse_json(text)
    entries.pop(METADATA, None)
    tensors: dict[str, Tensor] = {}

    def wrong() -> Iterator[str]:
        for key, entry in entries.items():
            try:
                dtype, shape, begin = _parse_entry(entry)
                tensors[key] = Tensor(dtype=dtype, shape=shape, file=file, offset=start + begin)
            except ValueError as error:
                yield f"{place}: {_text(key)}: {error}"

    if problems := first(wrong()) or first(f"{place}: {problem}" for problem in _layout_problems(tensors, start, size)):
        raise InputError(problems)
    return tensors


def _parse_entry(entry: object) -> tuple[np.dtype, tuple[int, ...], int]:
    """Type, shape and first byte behind the header of a tensor. Raises ValueError."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"is not a mapping with dtype, shape and data_offsets, but {shown(entry)}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"dtype: {shown(kind)} is not read. Allowed are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"shape: {shown(shape)} is not a list of at most {_MAX_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets: {shown(offsets)} is not the first byte and the last")
    if offsets[1] - offsets[0] != (needed := math.prod(shape) * dtype.itemsize):
        raise ValueError(f"data_offsets: has {offsets[1] - offsets[0]:,} bytes, but {kind}{shape} needs {needed:,}")
    return dtype, tuple(shape), offsets[0]


def _are_sizes(value: object) -> bool:
    # `type`, because true is an int.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_NUMBER for n in value)


def _layout_problems(tensors: Mapping[str, Tensor], start: int, size: int) -> Iterator[str]:
    """Bytes from the start of the tensors to the end of the file, that belong to no tensor or to two."""
    end, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            wrong = f"begins at byte {tensor.offset - start:,}, but {_text(before)} ends at byte {end - start:,}"
            yield f"{_text(name)}: data_offsets: {wrong}. No byte may belong to two tensors or to none"
        end, before = max(end, tensor.offset + tensor.nbytes), name
    if end != size:
        wrong = f"the tensors end at byte {end - start:,}, but the file at {size - start:,}"
        yield f"{_text(before)}: data_offsets: {wrong}. It may be cut short"


def _text(name: str) -> str:
    return shown(name, quotes=False)
