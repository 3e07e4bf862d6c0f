"""Lists of arrays: which of them have gradients, and how each of them travels between stages.

The executor passes arrays in lists, in the order of the variables of a split program (see the table in this package's
docstring). JAX differentiates floats only, so a list is separated into floats and other arrays before `jax.vjp` and merged
again inside the differentiated function. Random keys cannot be sent with `ppermute`, so they travel as their raw bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Var
from jgt.program.parts import Part

Arrays = list[jax.Array]
Structs = list[jax.ShapeDtypeStruct]
Integers = jax.Array | NDArray[np.int32]
Flags = jax.Array | NDArray[np.bool_]

_T = TypeVar("_T")
_Aux = TypeVar("_Aux")
_Args = TypeVarTuple("_Args")


def has_gradient(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether JAX differentiates by this value, which is to say whether it is a float or a complex number."""
    # JAX's function, because to numpy's own bf16 and the eight-bit types are not floats.
    return jnp.issubdtype(x.dtype, jnp.inexact)


def raw(x: jax.Array) -> jax.Array:
    """A value as plain numbers, which stages can send to each other: random keys become their bits."""
    return jax.random.key_data(x) if _is_key(x) else x


def from_raw(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The inverse of `raw` for a value of this dtype."""
    return cast(jax.Array, jax.random.wrap_key_data(x, impl=jx.key_impl(like))) if _is_key(like) else x


def raw_shape(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `raw(x)` for an x of this shape and dtype."""
    return jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like


def fold_key(key: jax.Array, number: Integers) -> jax.Array:
    """A random key fold_key with a number, or each key of an array of keys. Keys are typed, or their bits [..., 2]."""
    fold = jax.random.fold_in
    for _ in range(key.ndim - (0 if _is_key(key) else 1)):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclass(frozen=True)
class Floats:
    """Which entries of a list have gradients, to select them and to put them back in their places."""

    which: tuple[bool, ...]

    @classmethod
    def among(cls, values: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Floats:
        """The entries with gradients among these."""
        return cls(tuple(map(has_gradient, values)))

    def select(self, values: Sequence[_T]) -> list[_T]:
        """The entries with gradients."""
        return [v for v, f in zip(values, self.which, strict=True) if f]

    def others(self, values: Sequence[_T]) -> list[_T]:
        """The entries without gradients."""
        return [v for v, f in zip(values, self.which, strict=True) if not f]

    def merge(self, floats: Sequence[_T], others: Sequence[_T]) -> list[_T]:
        """The list that was separated into these two, each entry in its place again."""
        a, b = iter(floats), iter(others)
        return [next(a) if f else next(b) for f in self.which]


def row(x: jax.Array, index: Integers) -> jax.Array:
    """x[index], where the index may be traced."""
    return cast(jax.Array, jax.lax.dynamic_index_in_dim(x, index, keepdims=False))


def wide_zeros(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros to which values like x are added: in f32 for half precision."""
    # The sum over 32 microbatches in bf16, with 8 bits of mantissa, would ignore what is 256 times smaller than the sum.
    is_half = has_gradient(x) and jnp.dtype(x.dtype).itemsize < 4
    return jnp.zeros(x.shape, jnp.float32 if is_half else x.dtype)


def zeros(shapes: Structs, *lead: int) -> Arrays:
    """Zeros of these shapes, with more dims in front."""
    return [jnp.zeros((*lead, *s.shape), s.dtype) for s in shapes]


def vjp(fn: Callable[[*_Args], tuple[_T, _Aux]], *args: *_Args) -> tuple[_T, Callable[[_T], tuple[*_Args]], _Aux]:
    """`jax.vjp` with an auxiliary result, typed: fn(*args) → (differentiated, auxiliary)."""
    return cast("tuple[_T, Callable[[_T], tuple[*_Args]], _Aux]", jax.vjp(fn, *args, has_aux=True))


def call(part: Part, known: Mapping[Var, jax.Array]) -> Arrays:
    """A part's outputs in order, from known values by variable."""
    return part([known[var] for var in part.inputs])
