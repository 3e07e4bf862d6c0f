"""The growth of a value with the batch: like a sum over it, like a mean, or in a way that parts of the batch cannot reproduce.

Literals have a degree, too. A mean is traced as a sum divided by a literal, the number of elements. Nothing in the program says that it
grows with the batch, but at twice the batch the same literal is twice as large. So the second half of this file compares the constants of
two traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jgt.pipeline.batch.indexing import BY_INDEX
from jgt.pipeline.batch.rows import MixingError, Rows, merged_rows, names
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation

_LINEAR = names(
    "add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum div dot_general dynamic_slice dynamic_update_slice "
    "expand_dims gather mul name neg pad real reduce_precision reduce_sum reshape rev scatter-add scatter_add select_n "
    "sharding_constraint slice split squeeze stop_gradient sub tile transpose"
)
"""Primitives whose result is multiplied by n if their operands are. For mul, div and dot_general, degrees are added instead."""

_SELECTORS: dict[str, slice] = {
    "select_n": slice(0, 1),
    "gather": slice(1, None),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "scatter-add": slice(1, 2),
    "scatter_add": slice(1, 2),
}
"""The operands that decide which values are taken, as opposed to the values themselves."""


@dataclass(frozen=True)
class Extent:
    """The dependence of a value on the batch.

    rows: where it has rows; None for a number (or an array) that describes the whole batch or does not depend on it.
    degree: the power of the batch size with which it grows. of_batch: whether it was computed from rows.
    exact: whether the sum (or mean) of the values of the parts of the batch is the value of the whole batch.
    zero: whether it is 0 everywhere, so that it fits any degree. problem: why it is neither a sum nor a mean; empty if it is one.
    """

    rows: Rows | None = None
    degree: int = 0
    of_batch: bool = False
    exact: bool = True
    zero: bool = False
    problem: str = ""


INDEPENDENT = Extent()
"""The extent of a value that does not depend on the batch, such as a parameter."""


def result_extent(equation: Equation, operands: Sequence[Extent], rows: Rows | None) -> Extent:
    """The extent of a result that has `rows`, from the extents of the operands, none of which has a problem. Raises MixingError."""
    name = equation.primitive.name
    # Places do not grow like a power of the batch size; only an index may be made of them, which `index_rows` watches.
    if rows and rows.is_index:
        return Extent(rows)
    if all(e == INDEPENDENT or e.zero for e in operands):
        return Extent(rows, zero=_is_zero(name, operands))
    if rows is None and any(e.rows for e in operands):
        return _reduced(name, operands)
    return _row_by_row(equation, operands, rows)


def _is_zero(name: str, operands: Sequence[Extent]) -> bool:
    if name not in _LINEAR or not operands:
        return False
    if name in ("mul", "div", "dot_general"):
        return operands[0].zero
    return all(e.zero for e in _values(name, operands))


def _values(name: str, operands: Sequence[Extent]) -> list[Extent]:
    """The operands without those that only select."""
    selectors = range(*_SELECTORS[name].indices(len(operands))) if name in _SELECTORS else ()
    return [e for index, e in enumerate(operands) if index not in selectors]


def _row_by_row(equation: Equation, operands: Sequence[Extent], rows: Rows | None) -> Extent:
    """The extent of a result that has the rows of its operands, or is a number made of numbers."""
    name = equation.primitive.name
    of_batch = any(e.of_batch for e in operands)
    exact = all(e.exact for e in operands)
    rounds = name in ("div", "convert_element_type") and _rounds(equation)
    if name in ("mul", "dot_general"):
        # Linear in each factor, but a product of two sums over the batch is not a sum over the batch.
        num_sums = sum(e.of_batch and not e.rows for e in operands)
        return Extent(rows, sum(e.degree for e in operands), of_batch, exact and num_sums <= 1)
    if name == "div" and not rounds:
        over, under = operands
        return Extent(rows, over.degree - under.degree, of_batch, exact and (rows is not None or not under.of_batch), zero=over.zero)
    selectors = operands[_SELECTORS.get(name, slice(0, 0))]
    # An index that is a sum over the batch means something else in each microbatch.
    if any(e.degree for e in selectors):
        raise MixingError(f"{name} chooses by what grows with the batch")
    degree = _common_degree(equation, operands, rows)
    is_linear = name in _LINEAR and not rounds
    if degree and not is_linear:
        raise MixingError(f"{name} is not linear, but is taken of a sum over the batch")
    # Within a row any function is exact; of a number of the whole batch, only a linear one is.
    return Extent(rows, degree, of_batch, exact and (rows is not None or (is_linear and not any(e.of_batch for e in selectors))))


def _common_degree(equation: Equation, operands: Sequence[Extent], rows: Rows | None) -> int:
    degrees = {e.degree for e in _values(equation.primitive.name, operands) if not e.zero}
    if len(degrees) > 1:
        # An integer for each row, plus the batch size: JAX's arithmetic for an index that may count from the end.
        is_index = rows is not None and jx.is_integer(equation.outvars[0])
        raise MixingError(BY_INDEX if is_index else "it adds or compares what grows with the batch and what does not")
    return degrees.pop() if degrees else 0


def _rounds(equation: Equation) -> bool:
    """Whether a quotient or a cast drops the fraction."""
    if equation.primitive.name == "div":
        return jx.is_integer(equation.outvars[0])
    return not jx.is_inexact(equation.outvars[0]) and jx.is_inexact(equation.invars[0])


def _reduced(name: str, operands: Sequence[Extent]) -> Extent:
    """The extent of a number made of rows: a sum over them adds 1 to the degree."""
    exact = all(e.exact for e in operands)
    if name in ("reduce_sum", "dot_general"):
        return Extent(None, 1 + sum(e.degree for e in operands), True, exact)
    # A histogram: rows are added into zeros.
    if name in ("scatter-add", "scatter_add") and operands[0].zero:
        return Extent(None, 1 + operands[2].degree, True, exact)
    raise MixingError(f"{name} over the batch is neither a sum nor a mean")


def merged_extent(a: Extent, b: Extent) -> Extent:
    """The extent of a value that comes from one of two places: two branches, or the iterations of a loop. Raises MixingError."""
    if a.problem or b.problem:
        return a if a.problem else b
    if (a.rows is None) != (b.rows is None):
        raise MixingError("it has rows of the batch or none, depending on the branch or the iteration")
    rows = merged_rows(a.rows, b.rows) if a.rows and b.rows else None
    of_batch = a.of_batch or b.of_batch
    # Sums start at 0: `total = 0.0` before a loop fits whatever the loop makes of it.
    if a.zero or b.zero:
        other = b if a.zero else a
        return replace(other, rows=rows, of_batch=of_batch, zero=a.zero and b.zero)
    if a.degree != b.degree:
        raise MixingError("it grows with the batch or does not, depending on the branch or the iteration")
    return Extent(rows, a.degree, of_batch, a.exact and b.exact)


# Extents of constants


def constant_extent(value: ArrayLike, twin: ArrayLike, num_rows: tuple[int, int]) -> Extent:
    """The extent of a constant that is `value` and `twin` at batch sizes `num_rows`: twin / value must be a power of their ratio."""
    if isinstance(value, Tracer) or isinstance(twin, Tracer):
        if value is twin:
            return INDEPENDENT
        return Extent(problem="an array that is computed outside of the function depends on the batch size")
    # One array object in both traces: comparing it would copy it to the host.
    if value is twin and getattr(value, "size", 1) > 1:
        return INDEPENDENT
    a, b = _as_numpy(value), _as_numpy(twin)
    if a.ndim != b.ndim:
        return Extent(problem="the rank of an array in the program depends on the batch size")
    if a.shape != b.shape:
        return _growing_array(a, b, num_rows)
    # By bytes too, because nan != nan.
    if np.array_equal(a, b) or a.tobytes() == b.tobytes():
        return Extent(zero=not a.any())
    degrees = _powers(a, b, num_rows[1] / num_rows[0])
    if len(degrees) == 1 and (power := degrees.pop()).is_integer():
        return Extent(degree=round(power))
    if a.size == 1:
        return Extent(problem=f"the number {a.item():g} becomes {b.item():g} at another batch size, which is not a power of the batch size")
    return Extent(problem="an array in the program has other values at another batch size")


def _as_numpy(value: ArrayLike) -> np.ndarray:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _powers(a: np.ndarray, b: np.ndarray, ratio: float) -> set[float]:
    """Each p for which an element has b = ratio ** p * a, rounded if almost an integer; nan if an element has none."""
    if not (np.isrealobj(a) and np.isrealobj(b)):
        return {math.nan}
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    is_nonzero = (x != 0) | (y != 0)
    with np.errstate(all="ignore"):
        powers = np.log(y[is_nonzero] / x[is_nonzero]) / math.log(ratio)
    if not np.isfinite(powers).all():
        return {math.nan}
    # 1 / batch size in float32 is not exactly half of what it was.
    nearest = np.round(powers)
    return set(np.where(np.abs(powers - nearest) < 1e-3, nearest, powers).tolist())


def _growing_array(a: np.ndarray, b: np.ndarray, num_rows: tuple[int, int]) -> Extent:
    """An array with a dim that grows with the batch.

    A microbatch's program has a shorter one and does not know which rows it would be for. So all rows must be equal, or the array
    must be arange, whose values are followed as places.
    """
    dims = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if len(dims) == 1:
        (dim,) = dims
        row, twin_row = a.take([0], dim), b.take([0], dim)
        # [batch] of 1 / batch_size, for example: equal rows, and a degree of -1.
        if (a == row).all() and (b == twin_row).all():
            return replace(constant_extent(row, twin_row, num_rows), rows=Rows(dim, 0))
        if a.ndim == 1 and all(np.array_equal(x, np.arange(len(x))) for x in (a, b)):
            return Extent(Rows(0, 0, "place"))
    return Extent(
        Rows(dims[0], 0), problem="an array in the program has a different value for each row, and a microbatch would not find its own"
    )
