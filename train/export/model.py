"""The model of a checkpoint, piece by piece: what an export writes.

The model is the one that is evaluated: the average of the parameters if there is one, and with phases those of the last exchange. Frozen
parameters have neither, and may be in published files instead of the checkpoint. With `lora:` a matrix has the update of its adapter added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from jgt import Packing
from jgt.document import InputError

from ..checkpoint.listing import ArrayEntry
from ..checkpoint.manifest import FROZEN
from ..checkpoint.pieces import PIECE_BYTES, Span, pieces
from ..checkpoint.saved import SavedStep
from ..models.config import ModelConfig, OwnModel
from ..weights.adapt.adapters import factors_of
from ..weights.adapt.config import LoraConfig
from ..weights.base import frozen_paths, open_base
from ..weights.load import ROUTER_BIAS, Files
from ..weights.names import Shape

_Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The parameters of a checkpoint. arrays: by path, each with the number of its first dims that count replicas.

    lora: the section. factors: the paths of A and B of each adapted matrix, by its path. files: those of the base, if there is one.
    packing: how matrices of uint8 are packed.
    """

    saved: SavedStep
    arrays: Mapping[str, tuple[ArrayEntry, int]]
    lora: LoraConfig | None = None
    factors: Mapping[str, tuple[str, str]]
    files: Files | None = None
    packing: Packing | None = None

    @staticmethod
    def of(saved: SavedStep, model: ModelConfig | OwnModel | None = None, lora: LoraConfig | None = None) -> SavedModel:
        """The model of a checkpoint. model, lora: the sections of its run. Raises InputError and DiskError if its base cannot be read."""
        arrays = {path: array for path, array in _arrays(saved).items() if model is None or model.exports(path)}
        pairs = {path: factors_of(path) for path in arrays} if lora is not None else {}
        factors = {path: pair for path, pair in pairs.items() if arrays.keys() >= {*pair}}
        packing = None if model is None else Packing.named(model.base_dtype)
        made = SavedModel(saved=saved, arrays=arrays, lora=lora, factors=factors, packing=packing)
        if saved.manifest.base is None:
            return made
        shapes = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in made.shapes.items()}
        return replace(made, files=open_base(saved.manifest.base, model, shapes))

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters, without the factors of adapters."""
        of_adapters = {path for pair in self.factors.values() for path in pair}
        return {path: self._shape(entry)[n:] for path, (entry, n) in self.arrays.items() if path not in of_adapters}

    def pieces(self, path: str) -> Iterator[tuple[Span, _Array]]:
        """All parts of a parameter, each with its place, adapters added. Raises as `train.checkpoint.pieces.pieces` does."""
        (entry, n), update = self.arrays[path], self._update(path)
        for place, value in self._stored(path, entry, n):
            mean = value.mean(axis=0, dtype=np.float32) if n else value
            yield place[n:], mean if update is None else _added(mean, place[n:], *update)
            # Otherwise they would stay while the next part is read.
            del value, mean

    def _stored(self, path: str, entry: ArrayEntry, num_replicas: int) -> Iterator[tuple[Span, _Array]]:
        """All parts of a parameter as the model reads them: matrices that are packed have their rounding."""
        files = self.files if path in frozen_paths(self.saved.manifest.base) else None
        if entry.dtype != "uint8" or self.packing is None:
            stored = pieces(self.saved, entry, whole=range(num_replicas))
            yield from stored if files is None else files.pieces(path, entry.shape, entry.dtype, PIECE_BYTES)
        elif files is None:
            for place, value in pieces(self.saved, entry, whole=(len(entry.shape) - 1,)):
                yield (*place[:-1], slice(0, self._shape(entry)[-1])), np.asarray(self.packing.unpack(value))
        else:
            for place, value in files.pieces(path, self._shape(entry), np.float32, PIECE_BYTES):
                yield place, np.asarray(self.packing.unpack(self.packing.pack(value)))

    def _shape(self, entry: ArrayEntry) -> Shape:
        return entry.shape if self.packing is None or entry.dtype != "uint8" else self.packing.unpacked(entry.shape)

    def whole(self, path: str) -> _Array:
        """A small parameter, such as a factor."""
        entry, n = self.arrays[path]
        value = next(pieces(self.saved, entry, whole=range(len(entry.shape))))[1]
        return value.mean(axis=0, dtype=np.float32) if n else value

    def _update(self, path: str) -> tuple[_Array, _Array] | None:
        """A, times the scale, and B of a matrix. Raises InputError if their product has not the dims of the matrix, in order."""
        if self.lora is None or path not in self.factors:
            return None
        a, b = (self.whole(factor).astype(np.float32) for factor in self.factors[path])
        shape = self.shapes[path]
        if (*a.shape[:-1], b.shape[-1]) == shape:
            return self.lora.scale * a, b
        if (*a.shape[:-2], b.shape[-1], a.shape[-2]) == shape:
            # [out, in], as a head has it.
            return np.swapaxes(b, -1, -2), self.lora.scale * np.swapaxes(a, -1, -2)
        raise InputError([f"{path}: has the shape {list(shape)}, which is not a stack of matrices, so its adapter cannot be merged"])


def _added(value: _Array, place: Span, a: _Array, b: _Array) -> _Array:
    """A part of a matrix and of its update, a · b."""
    stack, rows, columns = place[:-2], place[-2], place[-1]
    update = a[(*stack, rows)] @ b[(*stack, slice(None), columns)]
    # In f32, as the model adds them, whatever the type of the matrix.
    return value.astype(np.float32) + update


def _arrays(saved: SavedStep) -> dict[str, tuple[ArrayEntry, int]]:
    by_part: dict[str, dict[str, ArrayEntry]] = {}
    for entry in saved.manifest.arrays:
        part, _, path = entry.path.partition("/")
        by_part.setdefault(part, {})[path] = entry
    part = next(part for part in ("average", "anchor", "params") if part in by_part)
    num_replicas = int(part == "average" and "anchor" in by_part)
    frozen = by_part.get(FROZEN, {}) | frozen_paths(saved.manifest.base)
    # Each replica has its own, whichever parameters are exported.
    kept = {path: entry for path, entry in by_part.get("variables", {}).items() if path.endswith(ROUTER_BIAS)}
    variables = {path: (entry, int("anchor" in by_part)) for path, entry in kept.items()}
    return (
        variables
        | {path: (entry, num_replicas) for path, entry in by_part[part].items()}
        | {path: (entry, 0) for path, entry in frozen.items()}
    )
