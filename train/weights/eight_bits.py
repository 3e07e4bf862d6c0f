"""Files whose matrices are in eight bits (fp8, e4m3), with a scale for each matrix or each block of it: they are read as the product.

The scale of `x.weight` is `x.weight_scale_inv` or `x.weight_scale`. Both are multiplied, whatever their names say. A part of a matrix needs
the scales of its blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .safetensors import DTYPES, PARAMETERS, Folder, Tensor, spans

E4M3 = DTYPES["F8_E4M3"]
_ENDS = ("_scale_inv", "_scale")
# Of activations and of a cache, which are computed in the model's type here.
_IDLE = ("input_scale", "activation_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class EightBits:
    """The matrices of a folder in eight bits. scales: the names of their scales, by theirs. block: as in `Described`."""

    folder: Folder
    scales: Mapping[str, str]
    block: tuple[int, int]

    @staticmethod
    def of(folder: Folder, block: tuple[int, int] | None) -> EightBits:
        """Those of a folder, of which config.json says this; none for None."""
        names = [name for name, tensor in folder.tensors.items() if tensor.dtype == E4M3] if block is not None else []
        found = {name: [f"{name}{end}" for end in _ENDS if f"{name}{end}" in folder.tensors] for name in names}
        return EightBits(folder, {name: scales[0] for name, scales in found.items() if len(scales) == 1}, block or (0, 0))

    def problems(self) -> Iterator[str]:
        """Scales that do not fit their matrices."""
        for name, scale in self.scales.items():
            tensor, found = self.folder.tensors[name], self.folder.tensors[scale]
            wanted = self._grid(tensor)
            is_one = not any(self.block) and found.shape in ((), (1,))
            if found.dtype not in PARAMETERS.values() or not (is_one or found.shape == wanted):
                has = f"{found.dtype}{list(found.shape)}, but {name} {list(tensor.shape)} needs one"
                yield f"the scale {scale} is {has} of {list(wanted)} in {', '.join(PARAMETERS)}"

    def without(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as a model needs them: without scales, and of matrices with a scale the type in which they are read."""
        skipped = {*self.scales.values(), *(name for name in tensors if self.scales and name.endswith(_IDLE))}
        f32 = PARAMETERS["F32"]
        return {
            name: Tensor(dtype=f32, shape=tensor.shape, file=tensor.file, offset=tensor.offset) if name in self.scales else tensor
            for name, tensor in tensors.items()
            if name not in skipped
        }

    def read(self, name: str, slices: Sequence[slice] = ()) -> np.ndarray[Any, Any]:
        """A part of a tensor as `Folder.read` reads it, in f32 if it is stored in eight bits."""
        part = self.folder.read(name, slices)
        if name not in self.scales:
            return part
        tensor, scale = self.folder.tensors[name], self.scales[name]
        if not any(self.block):
            return part.astype(np.float32) * self.folder.read(scale).astype(np.float32).reshape(())
        place, steps = spans(tensor, slices), self._steps(tensor)
        blocks = [slice(span.start // step, -(-span.stop // step)) for span, step in zip(place, steps, strict=True)]
        factors = self.folder.read(scale, blocks).astype(np.float32)
        for dim, (span, step, block) in enumerate(zip(place, steps, blocks, strict=True)):
            factors = np.take(factors, np.arange(span.start, span.stop) // step - block.start, axis=dim)
        return part.astype(np.float32) * factors

    def _steps(self, tensor: Tensor) -> tuple[int, ...]:
        """The sizes of a block. A stack of matrices has blocks of each of them."""
        return (*(1 for _ in tensor.shape[:-2]), *(self.block if any(self.block) else tensor.shape[-2:]))[-len(tensor.shape) :]

    def _grid(self, tensor: Tensor) -> tuple[int, ...]:
        """The number of blocks in each dim."""
        return tuple(-(-size // max(step, 1)) for size, step in zip(tensor.shape, self._steps(tensor), strict=True))
