"""Lists of values of which some have gradients and some are keys, and what they are added up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgt import jaxpr as jx

Values = list[Any]


def is_float(x: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def raw(x: Any) -> Any:
    """A value as plain numbers, which stages can send to each other: random keys become their bits."""
    return jax.random.key_data(x) if _is_key(x) else x


def whole_like(x: Any, like: Any) -> Any:
    """The inverse of raw."""
    return jax.random.wrap_key_data(x, impl=jx.key_kind(like)) if _is_key(like) else x


def raw_shape(like: Any) -> jax.ShapeDtypeStruct:
    """The shape of the raw value."""
    plain = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.eval_shape(jax.random.key_data, plain) if _is_key(like) else plain


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclass(frozen=True)
class Floats:
    """Which values of a list have gradients, to take them out and to put them back."""

    which: tuple[bool, ...]

    @classmethod
    def among(cls, values: Sequence[Any]) -> Floats:
        """Of arrays or ShapeDtypeStructs."""
        return cls(tuple(map(is_float, values)))

    def take(self, values: Sequence[Any]) -> Values:
        """The values with gradients."""
        return [v for v, f in zip(values, self.which, strict=True) if f]

    def leave(self, values: Sequence[Any]) -> Values:
        """The values without."""
        return [v for v, f in zip(values, self.which, strict=True) if not f]

    def merge(self, floats: Sequence[Any], others: Sequence[Any]) -> Values:
        """Both kinds in their places."""
        a, b = iter(floats), iter(others)
        return [next(a) if f else next(b) for f in self.which]


def float_variables(variables: Sequence[Any]) -> list[Any]:
    """The variables of a program that have gradients."""
    return Floats.among([v.aval for v in variables]).take(variables)


def wide_zeros(x: Any) -> Any:
    """Zeros to add up values like x in: half precision is added up in f32."""
    is_half = is_float(x) and jnp.dtype(x.dtype).itemsize < 4
    return jnp.zeros(x.shape, jnp.float32 if is_half else x.dtype)
