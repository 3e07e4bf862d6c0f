# pyright: basic
"""The layouts that XLA's partitioner computes wrongly, and layouts of the same operation that it computes correctly.

A matmul is wrong if a mesh axis has to move from one dim to another in a way that the partitioner orders wrongly; a window or a pad is
wrong if it moves along a split dim; a gather of rows is wrong if an axis moves from the rows to the columns, or if the table's rows are
split and the result's are split in another way than the indices. docs/partitioner.md has the table of faults and how they were found. In
the other layout, a mesh axis splits the same dim in all arrays of the operation: the partitioner then has nothing to rearrange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jgt.sharding.partitioner.shardy import AxisGrid, Splits, SubAxis, count_parts, type_shape

_Factor = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class OperationDims:
    """Which dims of an operation's arrays belong together.

    arrays: the numbers of the arrays among its operands and results. factors: for each independent dim, which dim of each array it is; None
    in an array without it. num_batch: how many of the first factors are the batch dims of a matmul. num_summed: how many of the last
    ones are summed over. num_columns: how many of the first factors are dims of the slices that a gather takes; None for others. A dim
    in no factor must be whole: something moves along it.
    """

    arrays: tuple[int, ...]
    factors: tuple[_Factor, ...]
    num_batch: int = 0
    num_summed: int = 0
    num_columns: int | None = None

    def moving(self, n: int, rank: int) -> set[int]:
        """The dims of array n along which something moves: a window, a group of features, or padding between elements."""
        return set(range(rank)) - {factor[n] for factor in self.factors}

    @property
    def summed(self) -> tuple[_Factor, ...]:
        """The factors that are summed over."""
        return self.factors[len(self.factors) - self.num_summed :]


def _dims_of_dot(op: Any) -> OperationDims:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batch = list(zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True))
    summed = list(zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True))
    bound = [{pair[n] for pair in batch + summed} for n in (0, 1)]
    free = [(d, None) for d in range(len(type_shape(op.operands[0]))) if d not in bound[0]]
    free += [(None, d) for d in range(len(type_shape(op.operands[1]))) if d not in bound[1]]
    factors = [*((*pair, out) for out, pair in enumerate([*batch, *free])), *((*pair, None) for pair in summed)]
    return OperationDims(arrays=(0, 1, 2), factors=tuple(factors), num_batch=len(batch), num_summed=len(summed))


def _dims_of_convolution(op: Any) -> OperationDims:
    n = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    groups, batches = (ir.IntegerAttr(op.attributes[name]).value for name in ("feature_group_count", "batch_group_count"))
    rows = (n.input_batch_dimension, None, n.output_batch_dimension)
    if groups > 1 or batches > 1:
        # A group is a part of a dim, which no spec can name.
        return OperationDims(arrays=(0, 1, 2), factors=(rows,) if batches == 1 else ())
    features = (None, n.kernel_output_feature_dimension, n.output_feature_dimension)
    inner = (n.input_feature_dimension, n.kernel_input_feature_dimension, None)
    return OperationDims(arrays=(0, 1, 2), factors=(rows, features, inner), num_summed=1)


def _dims_of_window(op: Any) -> OperationDims:
    """reduce_window has n operands, n initial values, n results; select_and_scatter an operand, a source, an initial value, a result."""
    half = len(op.operands) // 2
    if op.name == "stablehlo.select_and_scatter":
        arrays, moving = (0, 1, 3), ("window_dimensions", "window_strides")
    else:
        arrays, moving = (*range(half), *range(2 * half, 3 * half)), ("base_dilations", "window_dilations")
    numbers = [[*ir.DenseI64ArrayAttr(op.attributes[name])] for name in moving if name in op.attributes]
    still = [d for d in range(len(type_shape(op.operands[0]))) if all(sizes[d] == 1 for sizes in numbers)]
    return OperationDims(arrays=arrays, factors=tuple((d,) * len(arrays) for d in still))


def _dims_of_pad(op: Any) -> OperationDims:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    padding = zip(*(ir.DenseI64ArrayAttr(op.attributes[name]) for name in names), strict=True)
    still = [d for d, (low, high, inner) in enumerate(padding) if low >= 0 and high >= 0 and inner == 0]
    return OperationDims(arrays=(0, 2), factors=tuple((d, d) for d in still))


def _dims_of_gather(op: Any) -> OperationDims:
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


READERS: dict[str, Callable[[Any], OperationDims]] = {
    "stablehlo.dot_general": _dims_of_dot,
    "stablehlo.convolution": _dims_of_convolution,
    "stablehlo.reduce_window": _dims_of_window,
    "stablehlo.select_and_scatter": _dims_of_window,
    "stablehlo.pad": _dims_of_pad,
    "stablehlo.gather": _dims_of_gather,
}
"""The operations that may be computed wrongly, and the functions that read their dims."""


def better_layouts(
    dims: OperationDims, layouts: tuple[Splits, ...], shapes: Sequence[tuple[int, ...]], grid: AxisGrid
) -> tuple[Splits, ...]:
    """Layouts of an operation's arrays that are computed correctly: the given ones, unless they are known to be wrong."""
    if dims.num_columns is not None:
        return _compatible(dims, layouts, shapes) if _looks_up_wrongly(dims, layouts) else layouts
    moves = any(layout[d] for n, layout in enumerate(layouts) for d in dims.moving(n, len(layout)))
    is_wrong = moves or (dims.num_summed > 0 and _sums_wrongly(dims, layouts, grid))
    return _compatible(dims, layouts, shapes) if is_wrong else layouts


def _axes(layouts: Sequence[Splits], factor: _Factor, n: int) -> tuple[SubAxis, ...]:
    """The sub-axes that split a factor in array n."""
    d = factor[n]
    return () if d is None else layouts[n][d]


def _looks_up_wrongly(dims: OperationDims, layouts: Sequence[Splits]) -> bool:
    """Whether a gather splits the columns of its result by an axis that splits the rows of the table or the indices.

    Or it sums over the table's rows, which are split, and splits the rows of its result in another way than the indices.
    """
    columns, others = dims.factors[: dims.num_columns], dims.factors[dims.num_columns :]
    sums = any(_axes(layouts, factor, 0) for factor in others if factor[2] is None)
    if sums and any(_axes(layouts, factor, 1) != _axes(layouts, factor, 2) for factor in others if factor[2] is not None):
        return True
    of_columns = {sub_axis for factor in columns for sub_axis in _axes(layouts, factor, 2)}
    return any(sub_axis in of_columns for factor in others for n in (0, 1) for sub_axis in _axes(layouts, factor, n))


def _sums_wrongly(dims: OperationDims, layouts: Sequence[Splits], grid: AxisGrid) -> bool:
    """Whether a matmul, or a convolution as one, has one of the layouts that the partitioner sums wrongly."""
    batch = dims.factors[: dims.num_batch]
    if any(len({_axes(layouts, factor, n) for n in range(3)}) > 1 for factor in batch):
        return True
    split = [{sub_axis for n in range(3) for sub_axis in _axes(layouts, factor, n)} for factor in dims.factors]
    if any(sum(sub_axis in axes for axes in split) > 2 for sub_axis in grid.sub_axes):
        # An axis splits three different dims.
        return True
    counts = [[count_parts(_axes(layouts, factor, n)) for factor in dims.summed] for n in (0, 1)]
    if counts[0] != counts[1] and all(sum(count > 1 for count in one) > 1 for one in counts):
        # Both operands split several of the dims that are summed over, but differently. A sum is forgotten.
        return True
    if sum(size > 1 for _, _, size in grid.sub_axes) > 3 and not any(_only_gathers(dims, layouts, n) for n in range(3)):
        return True
    inside = _within_equal_rows(dims, layouts)
    subsets = [subset for n in range(dims.num_summed) for subset in itertools.combinations(dims.summed, n + 1)]
    return any(
        _reorders(grid, inside, operand, batch, subset)
        for operand, subset in itertools.product((0, 1), subsets)
        if any(_axes(inside, factor, operand) for factor in subset)
    )


def _only_gathers(dims: OperationDims, layouts: Sequence[Splits], array: int) -> bool:
    """Whether a matmul only needs to gather, or to cut, some dims of one array.

    With four axes there are too many layouts to try them all, so only these count as right.
    """
    split: list[SubAxis] = []
    gathered: set[SubAxis] = set()
    for factor in dims.factors:
        ways = {layouts[n][d] for n, d in enumerate(factor) if d is not None and n != array}
        mine = _axes(layouts, factor, array)
        if len(ways) > 1 or (mine and ways and len({*ways, mine, ()}) > 2):
            return False
        way = next(iter(ways), ())
        split += way
        gathered |= set(mine) - set(way)
    if len(split) != len(set(split)):
        return False
    # An axis that splits other arrays is gathered. The gather is forgotten if an axis that splits none is gathered with it, or if a sum is
    # split and the result has split dims of both operands.
    others, both = gathered - set(split), gathered & set(split)
    is_summed = any(_axes(layouts, factor, n) for factor in dims.summed for n in (0, 1))
    sides = [any(_axes(layouts, factor, 2) for factor in dims.factors if factor[other] is None) for other in (0, 1)]
    return not (both and (others or (is_summed and all(sides))))


def _within_equal_rows(dims: OperationDims, layouts: Sequence[Splits]) -> Sequence[Splits]:
    """The layouts within groups of devices that have the same rows, if the partitioner makes these groups before it looks at the sum.

    It does for the free dims of an operand that are split as in the result, if the result splits none of the other operand's.
    """
    out = layouts[2]
    for mine, other in ((0, 1), (1, 0)):
        free = [(f[mine], f[2]) for f in dims.factors if f[other] is None]
        equal = {sub_axis for d, o in free if d is not None and o is not None and layouts[mine][d] == out[o] for sub_axis in out[o]}
        if equal and not any(_axes(layouts, factor, 2) for factor in dims.factors if factor[mine] is None):
            return [tuple(tuple(sub_axis for sub_axis in axes if sub_axis not in equal) for axes in layout) for layout in layouts]
    return layouts


def _reorders(grid: AxisGrid, layouts: Sequence[Splits], operand: int, batch: Sequence[_Factor], summed: Sequence[_Factor]) -> bool:
    """Whether the result is split by the same groups of devices as the sum, but orders the devices of a group differently.

    The partitioner computes a matmul for each part of the sum, in a group of devices that have the order of an operand. A result that is
    split by the same groups it takes for ready, although its layout may order the devices of a group differently.
    """
    out = layouts[2]
    dims = [d for f in summed if (d := f[operand]) is not None]
    sub_axes = {sub_axis for d in dims for sub_axis in layouts[operand][d]}
    copies = grid.devices.size // count_parts(itertools.chain(*out))
    if copies > 1 and copies % count_parts(sub_axes) == 0:
        # The groups are made of devices that have the same part of the result, and are put in the operand's order.
        return False
    first, first_out = ([d for f in batch if (d := f[n]) is not None] for n in (operand, 2))
    mine = {frozenset(group): group for group in grid.groups(layouts[operand], [*first, *dims])}
    kept = [d for d, axes in enumerate(out) if d not in first_out and axes and set(axes) <= sub_axes]
    for copied in (False, True):
        theirs = grid.groups(out, [*first_out, *kept], and_copies=copied)
        if len(theirs) == len(mine) > 1 and {*map(frozenset, theirs)} == {*mine} and theirs != [mine[frozenset(group)] for group in theirs]:
            return True
    return False


def _compatible(dims: OperationDims, layouts: Sequence[Splits], shapes: Sequence[tuple[int, ...]]) -> tuple[Splits, ...]:
    """Layouts in which each sub-axis splits one factor, in all arrays that have it: the factor of which it splits the most elements now."""
    sizes = [next(shapes[n][d] for n, d in enumerate(factor) if d is not None) for factor in dims.factors]
    chosen: list[list[SubAxis]] = [[] for _ in dims.factors]

    def elements(factor: int, sub_axis: SubAxis) -> int:
        return sum(math.prod(shapes[n]) for n in range(len(shapes)) if sub_axis in _axes(layouts, dims.factors[factor], n))

    # The largest array comes first, so that its order of axes stays.
    largest = sorted(range(len(layouts)), key=lambda n: -math.prod(shapes[n]))
    for sub_axis in dict.fromkeys(sub_axis for n in largest for axes in layouts[n] for sub_axis in axes):
        split = max(range(len(chosen)), key=lambda factor: elements(factor, sub_axis), default=None)
        if split is not None and elements(split, sub_axis) and sizes[split] % count_parts([*chosen[split], sub_axis]) == 0:
            chosen[split].append(sub_axis)
    places = [{factor[n]: tuple(axes) for factor, axes in zip(dims.factors, chosen, strict=True)} for n in range(len(shapes))]
    return tuple(tuple(places[n].get(d, ()) for d in range(len(shape))) for n, shape in enumerate(shapes))
