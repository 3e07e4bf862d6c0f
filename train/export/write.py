"""Writing an export: the tensors come from a checkpoint, piece by piece, whatever mesh it was saved on.

So an export needs neither the run's devices nor the memory for its model, and a run that trains is not disturbed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..checkpoint.manifest import FROZEN, ArrayEntry
from ..checkpoint.pieces import PIECE_BYTES, Span, pieces
from ..checkpoint.saved import SavedStep
from ..weights.base import frozen_paths, open_base
from ..weights.names import Shape, Source, tensors_of
from ..weights.origin import DESCRIPTION
from ..weights.safetensors import DTYPES
from ..weights.writing import Piece, write_folder
from .form import Form

EXPORTED: Mapping[str, np.dtype[Any]] = {"f32": DTYPES["F32"], "bf16": DTYPES["BF16"]}
_TORCH = {"f32": "float32", "bf16": "bfloat16"}


def write_export(
    form: Form,
    saved: SavedStep,
    folder: Path,
    *,
    model: Any = None,
    dtype: str,
    max_file_bytes: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Writes the parameters of a checkpoint as a new folder. Returns the number of its tensors.

    model: the model section, where the checkpoint leaves frozen parameters to a base. check: called before each piece; an error of it ends
    the export. Raises InputError if there is something at the path or the checkpoint cannot be used, DiskError if it cannot be read, and
    OSError.
    """
    entries, shapes = _exported(saved), exported_shapes(saved)
    sources, kind = form.sources(shapes), EXPORTED[dtype]
    tensors, base, held = tensors_of(sources, shapes), saved.manifest.base, frozen_paths(saved.manifest.base)
    flat = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    files = None if base is None else open_base(base, model, flat)

    def parts() -> Iterator[Piece]:
        for path, source in sources.items():
            entry, num_replicas = entries[path]
            of_base = files if path in held else None
            stored = pieces(saved, entry, num_whole=num_replicas)
            for place, value in stored if of_base is None else of_base.pieces(path, entry.shape, entry.dtype, PIECE_BYTES):
                check()
                part = (value.mean(axis=0, dtype=np.float32) if num_replicas else value).astype(kind, copy=False)
                # Otherwise it would stay while the next one is read.
                del value
                yield from _tensor_parts(source, place[num_replicas:], part)
                del part

    text = json.dumps({**form.config, "torch_dtype": _TORCH[dtype]}, indent=2)
    others: dict[str, bytes | Path] = {DESCRIPTION: text.encode() + b"\n", **form.files}
    write_folder(folder, {name: (kind, shape) for name, shape in tensors.items()}, parts(), files=others, max_file_bytes=max_file_bytes)
    return len(tensors)


def exported_shapes(saved: SavedStep) -> dict[str, Shape]:
    """The shapes of the parameters of a checkpoint, by path."""
    return {path: entry.shape[num_replicas:] for path, (entry, num_replicas) in _exported(saved).items()}


def _exported(saved: SavedStep) -> dict[str, tuple[ArrayEntry, int]]:
    """The arrays of a checkpoint that are its model, by parameter, each with the number of its first dims that count replicas.

    The model is the one that is evaluated: the average of the parameters if there is one, and with phases those of the last exchange.
    Frozen parameters have neither.
    """
    by_part: dict[str, dict[str, ArrayEntry]] = {}
    for entry in saved.manifest.arrays:
        part, _, path = entry.path.partition("/")
        by_part.setdefault(part, {})[path] = entry
    part = next(part for part in ("average", "anchor", "params") if part in by_part)
    num_replicas = int(part == "average" and "anchor" in by_part)
    frozen = {path: (entry, 0) for path, entry in (by_part.get(FROZEN, {}) | frozen_paths(saved.manifest.base)).items()}
    return {path: (entry, num_replicas) for path, entry in by_part[part].items()} | frozen


def _tensor_parts(source: Source, place: Span, value: np.ndarray[Any, Any]) -> Iterator[Piece]:
    """The parts of tensors that a part of a parameter is. place: the part's place in the parameter."""
    stacked, inner = place[: source.num_stacked], place[source.num_stacked :]
    outputs = np.asarray(source.outputs[inner[-1]])
    # Where the next output of the parameter is not the next one of the tensor.
    cuts = [0, *(np.flatnonzero(np.diff(outputs) != 1) + 1), len(outputs)]
    for index in np.ndindex(*value.shape[: source.num_stacked]):
        name = source.at([span.start + n for span, n in zip(stacked, index, strict=True)])
        for begin, end in itertools.pairwise(cuts):
            slices, part = (*inner[:-1], slice(int(outputs[begin]), int(outputs[end - 1]) + 1)), value[index][..., begin:end]
            yield (name, slices[::-1], part.T) if source.is_transposed else (name, slices, part)
