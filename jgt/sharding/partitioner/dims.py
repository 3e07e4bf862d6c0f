# pyright: basic
"""Which dims of an operation's arrays belong together: read from the operation, for those that XLA computes wrongly in some layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jgt.sharding.partitioner.shardy import type_shape

Factor = tuple[int | None, ...]
"""A dim of the operation: which dim of each array it is; None in an array without it."""


@dataclass(frozen=True, kw_only=True)
class OperationDims:
    """Which dims of an operation's arrays belong together.

    A dim in no factor must be whole: something moves along it.

    arrays: the numbers of the arrays among its operands and results.
    factors: the independent dims.
    num_batch: how many of the first factors are the batch dims of a matmul.
    num_summed: how many of the last ones are summed over.
    num_columns: how many of the first factors are dims of the slices that a gather takes; None for others.
    even: the factors whose axes must divide them; None for an operation that has other faults.
    """

    arrays: tuple[int, ...]
    factors: tuple[Factor, ...]
    num_batch: int = 0
    num_summed: int = 0
    num_columns: int | None = None
    even: tuple[Factor, ...] | None = None

    def moving(self, n: int, rank: int) -> set[int]:
        """The dims of array n along which something moves: a window, a group of features, or padding between elements."""
        return set(range(rank)) - {factor[n] for factor in self.factors}

    @property
    def summed(self) -> tuple[Factor, ...]:
        """The factors that are summed over."""
        return self.factors[len(self.factors) - self.num_summed :]


def _dims_of_dot(op: ir.Operation) -> OperationDims:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batch = list(zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True))
    summed = list(zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True))
    bound = [{pair[n] for pair in batch + summed} for n in (0, 1)]
    free = [(d, None) for d in range(len(type_shape(op.operands[0]))) if d not in bound[0]]
    free += [(None, d) for d in range(len(type_shape(op.operands[1]))) if d not in bound[1]]
    factors = [*((*pair, out) for out, pair in enumerate([*batch, *free])), *((*pair, None) for pair in summed)]
    return OperationDims(arrays=(0, 1, 2), factors=tuple(factors), num_batch=len(batch), num_summed=len(summed))


def _dims_of_convolution(op: ir.Operation) -> OperationDims:
    n = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    groups, batches = (ir.IntegerAttr(op.attributes[name]).value for name in ("feature_group_count", "batch_group_count"))
    rows = (n.input_batch_dimension, None, n.output_batch_dimension)
    if groups > 1 or batches > 1:
        # A group is a part of a dim, which no spec can name.
        return OperationDims(arrays=(0, 1, 2), factors=(rows,) if batches == 1 else ())
    features = (None, n.kernel_output_feature_dimension, n.output_feature_dimension)
    inner = (n.input_feature_dimension, n.kernel_input_feature_dimension, None)
    return OperationDims(arrays=(0, 1, 2), factors=(rows, features, inner), num_summed=1)


def _dims_of_window(op: ir.Operation) -> OperationDims:
    """reduce_window has n operands, n initial values, n results; select_and_scatter an operand, a source, an initial value, a result."""
    half = len(op.operands) // 2
    if op.name == "stablehlo.select_and_scatter":
        arrays, moving = (0, 1, 3), ("window_dimensions", "window_strides")
    else:
        arrays, moving = (*range(half), *range(2 * half, 3 * half)), ("base_dilations", "window_dilations")
    numbers = [[*ir.DenseI64ArrayAttr(op.attributes[name])] for name in moving if name in op.attributes]
    still = [d for d in range(len(type_shape(op.operands[0]))) if all(sizes[d] == 1 for sizes in numbers)]
    return OperationDims(arrays=arrays, factors=tuple((d,) * len(arrays) for d in still))


def _dims_of_pad(op: ir.Operation) -> OperationDims:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    padding = zip(*(ir.DenseI64ArrayAttr(op.attributes[name]) for name in names), strict=True)
    still = [d for d, (low, high, inner) in enumerate(padding) if low >= 0 and high >= 0 and inner == 0]
    return OperationDims(arrays=(0, 2), factors=tuple((d, d) for d in still))


def _dims_of_gather(op: ir.Operation) -> OperationDims:
    """A gather sums over the dims that the indices choose from: each device looks up what it stores, and the others have zeros."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    ranks = [len(type_shape(value)) for value in (*op.operands, op.results[0])]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    of_indices = [d for d in range(ranks[1]) if d != numbers.index_vector_dim]
    of_rows = [d for d in range(ranks[2]) if d not in numbers.offset_dims]
    sliced = [d for d in range(ranks[0]) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    sizes, shape = [*ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])], type_shape(op.operands[0])
    columns = [(d, None, out) for d, out in zip(sliced, numbers.offset_dims, strict=True) if sizes[d] == shape[d]]
    rows = [(batching.get(d), d, out) for d, out in zip(of_indices, of_rows, strict=True)]
    chosen = [(d, None, None) for d in numbers.collapsed_slice_dims]
    return OperationDims(arrays=(0, 1, 2), factors=(*columns, *rows, *chosen), num_columns=len(columns))


def _dims_of_scatter(op: ir.Operation) -> OperationDims:
    """n operands, indices, n updates, n results. XLA's compiler dies of some whose indices are split unevenly."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    count = len(op.results)
    operand, indices, update = (type_shape(op.operands[n]) for n in (0, count, count + 1))
    alone = (*numbers.inserted_window_dims, *numbers.input_batching_dims)
    windows = zip([d for d in range(len(operand)) if d not in alone], numbers.update_window_dims, strict=True)
    of_indices = [d for d in range(len(indices)) if d != numbers.index_vector_dim]
    many = zip(of_indices, [d for d in range(len(update)) if d not in numbers.update_window_dims], strict=True)
    batch = dict(zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims, strict=True))
    # A window that is smaller than its dim lies in one part of it.
    factors = [(d, None, u if operand[d] == update[u] else None) for d, u in windows] + [(batch.get(i), i, u) for i, u in many]
    factors += [(d, None, None) for d in numbers.inserted_window_dims]
    of = [0] * count + [1] + [2] * count + [0] * count
    whole = tuple(tuple(factor[n] for n in of) for factor in factors)
    return OperationDims(arrays=tuple(range(len(of))), factors=whole, even=tuple(factor for factor in whole if factor[count] is not None))


READERS: dict[str, Callable[[ir.Operation], OperationDims]] = {
    "stablehlo.dot_general": _dims_of_dot,
    "stablehlo.convolution": _dims_of_convolution,
    "stablehlo.reduce_window": _dims_of_window,
    "stablehlo.select_and_scatter": _dims_of_window,
    "stablehlo.pad": _dims_of_pad,
    "stablehlo.gather": _dims_of_gather,
    "stablehlo.scatter": _dims_of_scatter,
}
"""The operations that may be computed wrongly, and the functions that read their dims."""
