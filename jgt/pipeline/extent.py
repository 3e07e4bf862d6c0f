"""How a value grows with the batch: as a sum over it, as a mean, or in no way that its parts could be added up to.

The degree of a value is 0 if twice the batch leaves it alike (a mean), 1 if it doubles it (a sum). A pipeline adds up what
has degree 1 over its microbatches and averages what has degree 0; anything else that depends on the whole batch has no
meaning for a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jgt import jaxpr as jx
from jgt.jaxpr import Equation
from jgt.pipeline.indexing import BY_INDEX
from jgt.pipeline.rows import MixingError, Rows, names
from jgt.pipeline.rows import either as either_rows

_LINEAR = names(
    "add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum div dot_general dynamic_slice dynamic_update_slice "
    "expand_dims gather mul name neg pad real reduce_precision reduce_sum reshape rev scatter-add scatter_add select_n "
    "sharding_constraint slice split squeeze stop_gradient sub tile transpose"
)
"""Primitives that multiply their result by n when they multiply their operands by n; mul, div and dot_general add degrees."""

_CHOOSING: dict[str, slice] = {
    "select_n": slice(0, 1),
    "gather": slice(1, None),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "scatter-add": slice(1, 2),
    "scatter_add": slice(1, 2),
}
"""The operands that say which values are taken, and are not among them."""


@dataclass(frozen=True)
class Extent:
    """What a value is of the batch.

    rows: where it has rows; None for a number (or an array) of the whole batch. of_batch: it was computed from rows.
    exact: summing (or averaging) the values of parts of the batch gives that of the whole, not merely something alike.
    zero: it is 0 all over. problem: why it is neither a sum nor a mean.
    """

    rows: Rows | None = None
    degree: int = 0
    of_batch: bool = False
    exact: bool = True
    zero: bool = False
    problem: str = ""


SAME = Extent()


def extent_of(equation: Equation, given: Sequence[Extent], rows: Rows | None) -> Extent:
    """The extent of a result that has `rows`, from those of the operands, none of which has a problem. Raises MixingError."""
    name = equation.primitive.name
    if rows and rows.is_index:
        return Extent(rows)
    if all(e == SAME or e.zero for e in given):
        return Extent(rows, zero=_is_zero(name, given))
    if rows is None and any(e.rows for e in given):
        return _reduced(name, given)
    return _alike(equation, given, rows)


def _is_zero(name: str, given: Sequence[Extent]) -> bool:
    if name not in _LINEAR or not given:
        return False
    if name in ("mul", "div", "dot_general"):
        return given[0].zero
    return all(e.zero for e in _values(name, given))


def _values(name: str, given: Sequence[Extent]) -> list[Extent]:
    choosing = range(*_CHOOSING[name].indices(len(given))) if name in _CHOOSING else ()
    return [e for index, e in enumerate(given) if index not in choosing]


def _alike(equation: Equation, given: Sequence[Extent], rows: Rows | None) -> Extent:
    """Rows from rows, or numbers from numbers."""
    name = equation.primitive.name
    of_batch = any(e.of_batch for e in given)
    exact = all(e.exact for e in given)
    rounds = name in ("div", "convert_element_type") and _rounds(equation)
    if name in ("mul", "dot_general"):
        num_of_batch = sum(e.of_batch and not e.rows for e in given)
        return Extent(rows, sum(e.degree for e in given), of_batch, exact and num_of_batch <= 1)
    if name == "div" and not rounds:
        over, under = given
        return Extent(rows, over.degree - under.degree, of_batch, exact and (rows is not None or not under.of_batch), zero=over.zero)
    choosing = given[_CHOOSING.get(name, slice(0, 0))]
    if any(e.degree for e in choosing):
        raise MixingError(f"{name} chooses by what grows with the batch")
    degrees = {e.degree for e in _values(name, given) if not e.zero}
    if len(degrees) > 1:
        counts_from_the_end = rows is not None and jx.is_integer(equation.outvars[0])
        raise MixingError(BY_INDEX if counts_from_the_end else "it adds or compares what grows with the batch and what does not")
    (degree,) = degrees or {0}
    is_linear = name in _LINEAR and not rounds
    if degree and not is_linear:
        raise MixingError(f"{name} is not linear, but is taken of a sum over the batch")
    return Extent(rows, degree, of_batch, exact and (rows is not None or (is_linear and not any(e.of_batch for e in choosing))))


def _rounds(equation: Equation) -> bool:
    """Whether a quotient or a cast loses what is behind the point."""
    if equation.primitive.name == "div":
        return jx.is_integer(equation.outvars[0])
    return not jx.is_inexact(equation.outvars[0]) and jx.is_inexact(equation.invars[0])


def _reduced(name: str, given: Sequence[Extent]) -> Extent:
    """A number from rows."""
    exact = all(e.exact for e in given)
    if name in ("reduce_sum", "dot_general"):
        return Extent(None, 1 + sum(e.degree for e in given), True, exact)
    if name in ("scatter-add", "scatter_add") and given[0].zero:
        return Extent(None, 1 + given[2].degree, True, exact)
    raise MixingError(f"{name} over the batch is neither a sum nor a mean")


def either(a: Extent, b: Extent) -> Extent:
    """The extent of a value that is one of two: of the branches of a cond, or before and after a turn of a loop. Raises MixingError."""
    if a.problem or b.problem:
        return a if a.problem else b
    if (a.rows is None) != (b.rows is None):
        raise MixingError("it has rows of the batch, or has none")
    rows = either_rows(a.rows, b.rows) if a.rows and b.rows else None
    of_batch = a.of_batch or b.of_batch
    if a.zero or b.zero:
        other = b if a.zero else a
        return replace(other, rows=rows, of_batch=of_batch, zero=a.zero and b.zero)
    if a.degree != b.degree:
        raise MixingError("it is what grows with the batch, or what does not")
    return Extent(rows, a.degree, of_batch, a.exact and b.exact)


def of_constant(value: Any, other: Any, num_rows: tuple[int, int]) -> Extent:
    """The extent of a number or array that a program holds, at two batch sizes: a count of rows is another one, to some power."""
    if isinstance(value, Tracer) or isinstance(other, Tracer):
        return SAME if value is other else Extent(problem="an array that is being computed around the function is another one at another batch size")
    if value is other and getattr(value, "size", 1) > 1:
        return SAME
    a, b = _plain(value), _plain(other)
    if a.ndim != b.ndim:
        return Extent(problem="an array that the program holds has another rank at another batch size")
    if a.shape != b.shape:
        return _growing(a, b, num_rows)
    if np.array_equal(a, b) or a.tobytes() == b.tobytes():
        return Extent(zero=not a.any())
    degrees = _powers(a, b, num_rows[1] / num_rows[0])
    if len(degrees) == 1 and (power := degrees.pop()).is_integer():
        return Extent(degree=round(power))
    if a.size == 1:
        return Extent(problem=f"the number {a.item():g} becomes {b.item():g} at another batch size, which is no power of the batch")
    return Extent(problem="an array that the program holds is another one at another batch size")


def _plain(value: Any) -> np.ndarray:
    # Keys are no numbers to numpy.
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _powers(a: np.ndarray, b: np.ndarray, ratio: float) -> set[float]:
    """The p for which b = ratio ** p * a, rounded where they are close; nan where there is none."""
    if not (np.isrealobj(a) and np.isrealobj(b)):
        return {math.nan}
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    both = (x != 0) | (y != 0)
    with np.errstate(all="ignore"):
        powers = np.log(y[both] / x[both]) / math.log(ratio)
    if not np.isfinite(powers).all():
        return {math.nan}
    near = np.round(powers)
    return set(np.where(np.abs(powers - near) < 1e-3, near, powers).tolist())


def _growing(a: np.ndarray, b: np.ndarray, num_rows: tuple[int, int]) -> Extent:
    """An array with a dim of the rows: the micro program has one of its own, which must not differ from row to row."""
    dims = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if len(dims) == 1:
        (dim,) = dims
        first, other = a.take([0], dim), b.take([0], dim)
        if (a == first).all() and (b == other).all():
            return replace(of_constant(first, other, num_rows), rows=Rows(dim, 0))
        if a.ndim == 1 and all(np.array_equal(x, np.arange(len(x))) for x in (a, b)):
            return Extent(Rows(0, 0, "place"))
    return Extent(Rows(dims[0], 0), problem="an array that the program holds has rows of the batch, which a microbatch does not find in it")
