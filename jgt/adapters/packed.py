"""Frozen matrices in four or eight bits, as the equations between an argument and its matmul see them.

    f32 [*dims, n]    becomes    uint8 [*dims, n / 64 · 34] with nf4, [*dims, n / 64 · 66] with int8

Each 64 neighbours of the last dim are a block: their codes and, behind them, the scale in bf16, which is the largest of their magnitudes.
So a packed matrix is one array with as many dims as the matrix, and has its path, rules and place in a checkpoint. Two codes of four bits
share a byte: those of a block's first half are the low ones.

A matmul unpacks the matrix just before it reads it, in the turn of a scan that reads it, and again in the backward pass. So only one layer
is unpacked at a time. nf4 is the code of QLoRA (arXiv 2305.14314): the quantiles of a normal distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType]
from jax.typing import ArrayLike

_BLOCK = 64
_SCALE_BYTES = 2
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The number that each of the sixteen codes stands for: QLoRA, appendix E."""
_INT8_MAX = 127


@dataclass(frozen=True)
class Packing:
    """A way to pack matrices."""

    name: Literal["nf4", "int8"]

    @staticmethod
    def named(name: str) -> Packing | None:
        """The packing with this name; None for the name of a type, such as bf16."""
        return Packing(name) if name in ("nf4", "int8") else None

    @property
    def _bytes(self) -> int:
        """The bytes of a block."""
        return _SCALE_BYTES + (_BLOCK // 2 if self.name == "nf4" else _BLOCK)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a matrix of this shape consists of whole blocks."""
        return shape[-1] % _BLOCK == 0

    def packed(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a packed matrix, from the shape of the matrix."""
        return (*shape[:-1], shape[-1] // _BLOCK * self._bytes)

    def unpacked(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a matrix, from its shape when it is packed."""
        return (*shape[:-1], shape[-1] // self._bytes * _BLOCK)

    def shape_of(self, x: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """The shape of a parameter when it is unpacked, whether it is packed or not."""
        return self.unpacked(x.shape) if x.dtype == jnp.uint8 else tuple(x.shape)

    def blocks(self, bytes: range) -> tuple[range, slice]:
        """The range of the last dim whose blocks contain these bytes, and where the bytes are within these blocks."""
        first, last = bytes.start // self._bytes, -(-bytes.stop // self._bytes)
        begin = first * self._bytes
        return range(first * _BLOCK, last * _BLOCK), slice(bytes.start - begin, bytes.stop - begin)

    def whole(self, size: int) -> int:
        """The size rounded down to whole blocks, at least one."""
        return max(size // _BLOCK, 1) * _BLOCK

    def pack(self, x: ArrayLike) -> jax.Array:
        """A matrix [*dims, n] of floats, packed: uint8."""
        x = jnp.asarray(x, jnp.float32)
        x = x.reshape(*x.shape[:-1], -1, _BLOCK)
        scale = jnp.max(jnp.abs(x), axis=-1).astype(jnp.bfloat16)
        x = x / jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
        if self.name == "nf4":
            middles = [(low + high) / 2 for low, high in itertools.pairwise(_NF4)]
            codes = sum((x > middle).astype(jnp.uint8) for middle in middles)
            low, high = jnp.split(cast(jax.Array, codes), 2, axis=-1)
            codes = low | (high << 4)
        else:
            # The scale may have been rounded down.
            codes = jnp.clip(jnp.round(x * _INT8_MAX), -_INT8_MAX, _INT8_MAX).astype(jnp.int8)
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        blocks = jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale, jnp.uint8)], axis=-1)
        return blocks.reshape(*blocks.shape[:-2], -1)

    def unpack(self, packed: ArrayLike) -> jax.Array:
        """The matrix [*dims, n], f32."""
        packed = jnp.asarray(packed)
        blocks = packed.reshape(*packed.shape[:-1], -1, self._bytes)
        codes, scale = blocks[..., :-_SCALE_BYTES], jax.lax.bitcast_convert_type(blocks[..., -_SCALE_BYTES:], jnp.bfloat16)
        if self.name == "nf4":
            x = _chosen(_NF4, jnp.concatenate([codes & 15, codes >> 4], axis=-1))
        else:
            x = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32) / _INT8_MAX
        return (x * scale.astype(jnp.float32)[..., None]).reshape(self.unpacked(packed.shape))


def _chosen(numbers: Sequence[float], codes: jax.Array) -> jax.Array:
    # Bit by bit, because the function of experts may not close over an array, such as a table.
    chosen: list[Any] = list(numbers)
    for bit in range(len(numbers).bit_length() - 1):
        is_set = (codes >> bit) & 1 == 1
        chosen = [jnp.where(is_set, high, low) for low, high in zip(chosen[::2], chosen[1::2], strict=True)]
    return chosen[0]


_Change = Callable[[jax.Array], jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=("bytes",), meta_fields=("packing", "name", "changes"))
@dataclass(frozen=True)
class Packed:
    """A packed matrix, and the changes that lie between it and the matmul that will read it.

    name: what rules call the bytes where they are unpacked, to say that devices exchange these, and not the numbers.
    """

    bytes: jax.Array
    packing: Packing
    name: str
    changes: tuple[_Change, ...] = ()

    def value(self) -> jax.Array:
        """The matrix with its changes."""
        x = self.packing.unpack(checkpoint_name(self.bytes, self.name))
        for change in self.changes:
            x = change(x)
        return x

    def changed(self, change: _Change) -> Packed:
        """The matrix with a further change."""
        return replace(self, changes=(*self.changes, change))

    @cached_property
    def _aval(self) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self._aval.shape

    @property
    def dtype(self) -> Any:
        """The type of the matrix."""
        return self._aval.dtype


def changed(x: jax.Array | Packed, change: _Change) -> jax.Array | Packed:
    """A matrix with a change, which a packed one makes when it is read."""
    return x.changed(change) if isinstance(x, Packed) else change(x)


def sliceable(x: jax.Array | Packed) -> jax.Array | Packed:
    """A matrix of which a scan can take slices: a packed one that was changed before is unpacked."""
    return x.value() if isinstance(x, Packed) and x.changes else x


def read_by(x: jax.Array | Packed, call: _Change) -> jax.Array:
    """The result of call(x). A packed matrix is unpacked for the call, and once more for its derivative: only the bytes are kept."""
    if not isinstance(x, Packed):
        return call(x)

    def of_packed(packed: Packed) -> jax.Array:
        return call(packed.value())

    return cast(jax.Array, jax.checkpoint(of_packed)(x))
