# pyright: basic
"""The layouts that XLA's partitioner computes wrongly, and layouts of the same operation that it computes correctly.

A matmul is wrong if a mesh axis has to move from one dim to another in a way that the partitioner orders wrongly; a window or a pad is
wrong if it moves along a split dim; a gather of rows is wrong if an axis moves from the rows to the columns, or if the table's rows are
split and the result's are split in another way than the indices. XLA dies of a scatter whose indices are split unevenly.
docs/partitioner.md has the table of faults and how they were found. In the other layout, a mesh axis splits the same dim in all arrays of
the operation: the partitioner then has nothing to rearrange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jgt.sharding.partitioner.dims import Factor, OperationDims
from jgt.sharding.partitioner.grid import AxisGrid, Splits, SubAxis, count_parts


def better_layouts(
    dims: OperationDims, layouts: tuple[Splits, ...], shapes: Sequence[tuple[int, ...]], grid: AxisGrid
) -> tuple[Splits, ...]:
    """Layouts of an operation's arrays that are computed correctly: the given ones, unless they are known to be wrong."""
    if dims.even is not None:
        parts = ((shapes[n][d], layouts[n][d]) for factor in dims.even for n, d in enumerate(factor) if d is not None)
        return layouts if all(size % count_parts(axes) == 0 for size, axes in parts) else _compatible(dims, layouts, shapes)
    if dims.num_columns is not None:
        if not _looks_up_wrongly(dims, layouts, grid):
            return layouts
        found = _compatible(dims, layouts, shapes)
        return _with_whole_indices(dims, found) if _looks_up_wrongly(dims, found, grid) else found
    moves = any(layout[d] for n, layout in enumerate(layouts) for d in dims.moving(n, len(layout)))
    is_wrong = moves or (dims.num_summed > 0 and _sums_wrongly(dims, layouts, grid))
    return _compatible(dims, layouts, shapes) if is_wrong else layouts


def _axes(layouts: Sequence[Splits], factor: Factor, n: int) -> tuple[SubAxis, ...]:
    """The sub-axes that split a factor in array n."""
    d = factor[n]
    return () if d is None else layouts[n][d]


def _has_many_axes(grid: AxisGrid) -> bool:
    """Whether there are more than three axes, and so too many layouts to try them all."""
    return sum(size > 1 for _, _, size in grid.sub_axes) > 3


def _looks_up_wrongly(dims: OperationDims, layouts: Sequence[Splits], grid: AxisGrid) -> bool:
    """Whether a gather splits the columns of its result by an axis that splits the rows of the table or the indices.

    Or it sums over the table's rows, which are split, and splits the rows of its result in another way than the indices. With four axes,
    it may also be wrong if it sums, and splits the indices and the columns of its result.
    """
    columns, others = dims.factors[: dims.num_columns], dims.factors[dims.num_columns :]
    sums = any(_axes(layouts, factor, 0) for factor in others if factor[2] is None)
    if sums and any(_axes(layouts, factor, 1) != _axes(layouts, factor, 2) for factor in others if factor[2] is not None):
        return True
    of_columns = {sub_axis for factor in columns for sub_axis in _axes(layouts, factor, 2)}
    if sums and of_columns and _has_many_axes(grid) and any(_axes(layouts, factor, 1) for factor in others):
        return True
    return any(sub_axis in of_columns for factor in others for n in (0, 1) for sub_axis in _axes(layouts, factor, n))


def _with_whole_indices(dims: OperationDims, layouts: Sequence[Splits]) -> tuple[Splits, ...]:
    """The layouts of a gather without the axes that split its indices alone."""
    whole = {(n, d) for factor in dims.factors if factor[0] is None for n, d in enumerate(factor) if factor[1] is not None}
    return tuple(tuple(() if (n, d) in whole else axes for d, axes in enumerate(layout)) for n, layout in enumerate(layouts))


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
    num_split = sorted(sum(count > 1 for count in one) for one in counts)
    if counts[0] != counts[1] and num_split[0] > 0 and num_split[1] > 1:
        # Both operands split dims that are summed over, one of them several, but differently. A sum is forgotten.
        return True
    if _has_many_axes(grid) and not any(_only_gathers(dims, layouts, n) for n in range(3)):
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


def _reorders(grid: AxisGrid, layouts: Sequence[Splits], operand: int, batch: Sequence[Factor], summed: Sequence[Factor]) -> bool:
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
