"""Files whose experts are in four bits (mxfp4, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).

The matrices [E, in, out] of `x` are `x_blocks`, uint8 [E, out, in / 32, 16], and `x_scales`, uint8 [E, out, in / 32]. A byte has two
numbers, the first one in its low bits. 32 of them have one scale, a power of two. A part of the matrices needs the bytes of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .safetensors import DTYPES, PARAMETERS, Folder, Tensor, spans

_BLOCKS, _SCALES = "_blocks", "_scales"
_SIZE, _BIAS = 32, 127
_TYPE = DTYPES["U8"]
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])


@dataclass(frozen=True)
class FourBits:
    """The tensors of a folder of which some are in four bits. packed: the matrices, by the names that they have when they are not."""

    folder: Folder
    packed: Mapping[str, Tensor]

    @staticmethod
    def of(folder: Folder) -> FourBits:
        """Those of a folder whose config.json says so."""
        sound = [stem for stem in _stems(folder.tensors) if _problem(folder, stem) is None]
        return FourBits(folder, {stem: _unpacked(folder.tensors[stem + _BLOCKS]) for stem in sound})

    def problems(self) -> Iterator[str]:
        """Blocks and scales that do not fit each other."""
        found = (_problem(self.folder, stem) for stem in _stems(self.folder.tensors))
        yield from (problem for problem in found if problem is not None)

    def without(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as a model needs them: in the place of blocks and scales the matrices."""
        parts = {f"{stem}{end}" for stem in _stems(tensors) for end in (_BLOCKS, _SCALES)}
        return {name: tensor for name, tensor in tensors.items() if name not in parts} | dict(self.packed)

    def read(self, name: str, slices: Sequence[slice] = ()) -> np.ndarray[Any, Any]:
        """A part of a tensor as `Folder.read` reads it, in f32 if it is stored in four bits."""
        if name not in self.packed:
            return self.folder.read(name, slices)
        part = spans(self.packed[name], slices)
        made = np.empty([len(span) for span in part], np.float32)
        # One after another, as what it takes to unpack a matrix is several times the matrix.
        for n, expert in enumerate(part[0]):
            made[n] = self._matrix(name, expert, *part[1:])
        return made

    def _matrix(self, name: str, expert: int, inputs: range, outputs: range) -> np.ndarray[Any, Any]:
        first = inputs.start // _SIZE
        place = [slice(expert, expert + 1), slice(outputs.start, outputs.stop, outputs.step), slice(first, -(-inputs.stop // _SIZE))]
        codes, scales = (self.folder.read(f"{name}{end}", place)[0] for end in (_BLOCKS, _SCALES))
        numbers = _VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*scales.shape, _SIZE)
        rows = np.ldexp(numbers, scales[..., None].astype(np.int32) - _BIAS).reshape(len(outputs), -1)
        return rows[:, inputs.start - first * _SIZE : inputs.stop - first * _SIZE].T


def _unpacked(blocks: Tensor) -> Tensor:
    experts, outputs, groups, _ = blocks.shape
    return Tensor(dtype=PARAMETERS["F32"], shape=(experts, groups * _SIZE, outputs), file=blocks.file, offset=blocks.offset)


def _stems(names: Iterable[str]) -> list[str]:
    """The names of matrices that have blocks or scales."""
    return list(dict.fromkeys(name.removesuffix(end) for name in names for end in (_BLOCKS, _SCALES) if name.endswith(end)))


def _problem(folder: Folder, stem: str) -> str | None:
    """The problem of blocks or of their scales; None if they fit."""
    blocks, scales = (folder.tensors.get(f"{stem}{end}") for end in (_BLOCKS, _SCALES))
    if blocks is None or scales is None:
        there, lacking, tensor = (_BLOCKS, _SCALES, blocks) if scales is None else (_SCALES, _BLOCKS, scales)
        return f"the tensor {stem}{there}{_place(tensor)} has no {stem}{lacking}"
    if blocks.dtype != _TYPE or len(blocks.shape) != 4 or blocks.shape[-1] != _SIZE // 2:
        needed = f"uint8 [experts, out, in / {_SIZE}, {_SIZE // 2}]"
        return f"the tensor {stem}{_BLOCKS}{_place(blocks)} is {blocks.dtype}{list(blocks.shape)}, not {needed}"
    if scales.dtype != _TYPE or scales.shape != blocks.shape[:-1]:
        needed = f"its blocks need uint8 {list(blocks.shape[:-1])}"
        return f"the tensor {stem}{_SCALES}{_place(scales)} is {scales.dtype}{list(scales.shape)}, but {needed}"
    if stem in folder.tensors:
        return f"the tensor {stem}{_place(folder.tensors[stem])} is there in four bits, too. Keep one of them"
    return None


def _place(tensor: Tensor | None) -> str:
    return "" if tensor is None else f" in {tensor.file.name}"
