# pyright: basic
"""XLA's partitioner computes some legal layouts wrongly, without a word. This file gives such operations another layout.

An example on a mesh (data, fsdp, tensor) of 2 x 2 x 2 devices: x [rows over data and fsdp, features over tensor] @ w [features over tensor,
columns over fsdp] with a result [rows over data and fsdp, columns over tensor] is off by as much as the result is large. Each of the three
layouts is legal.

Whether an operation is wrong depends on the layouts of its operands and of its result. Shardy chooses most of these when XLA compiles the
whole training step; the matmuls of the gradient do not even exist before. So the check takes place between lowering and compiling.
It reads the layouts that Shardy will choose (`shardy.py`) and compares them with what is known to be wrong: docs/partitioner.md has the
table of faults, how they were found, and the report to XLA. If nothing is wrong, XLA gets the very program that it would
have got. Otherwise it gets one with sharding constraints around each such operation, by which a mesh axis splits the same dim in all arrays
of the operation. The partitioner then has nothing to rearrange inside the operation, which is what it does wrongly.

When XLA is mended, delete this folder: only `Sharded` and the planner call it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax._src import compiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from jgt.partitioner.shardy import (
    AxisGrid,
    Splits,
    SubAxis,
    choose_layouts,
    inline_calls,
    joined,
    manual_axes,
    meshes_of,
    operations,
    parts,
    sharding_of,
    type_shape,
)

MARK = "avoided_fault"
"""The last part of the names of the added constraints, and so of the collectives that they cause."""
_NUMBER = "jgt.number"


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An operation that got another layout.

    name: the operation with its scopes, as in the HLO. line: the file:line that it comes from. before, after: the layouts of its operands
    and of its result, as PartitionSpecs are written.
    """

    name: str
    line: str
    before: str
    after: str


_collected: ContextVar[list[Avoided] | None] = ContextVar("avoided faults", default=None)


@contextlib.contextmanager
def avoided_faults() -> Iterator[list[Avoided]]:
    """Collects the operations that get another layout in the programs that are compiled inside."""
    found: list[Avoided] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


_is_off: ContextVar[bool] = ContextVar("faults are not avoided", default=False)


@contextlib.contextmanager
def with_faults() -> Iterator[None]:
    """Compiles programs inside as XLA would, faults included: for tests, and to see whether XLA still has them."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


@functools.cache
def avoid_faults() -> None:
    """From now on, every program that this process compiles is checked first. A second call changes nothing."""
    compile_or_get_cached = compiler.compile_or_get_cached

    @functools.wraps(compile_or_get_cached)
    def checked(backend: Any, computation: ir.Module, *args: Any, **kwargs: Any) -> Any:
        module = computation if _is_off.get() else without_faults(computation)
        return compile_or_get_cached(backend, module, *args, **kwargs)

    compiler.compile_or_get_cached = checked


def without_faults(module: ir.Module) -> ir.Module:
    """The module itself, or a copy in which no operation has a layout that is known to be computed wrongly.

    In a copy, all matmuls and windows are constrained, the right ones to the layouts that they have anyway: Shardy might choose others
    for them in the new program.
    """
    with module.context, ir.Location.unknown():
        if not _may_have_faults(module):
            return module
        copy = module.operation.clone()
        inline_calls(copy)
        layouts = _layouts(copy)
        wrong = [found.avoided for found in layouts if found.avoided is not None]
        if not wrong:
            return module
        module = _copy(module)
        inline_calls(module)
        _constrain(module, layouts)
    if (collected := _collected.get()) is not None:
        collected += wrong
    return module


# The dims of operations


_Factor = tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class _Dims:
    """How the dims of an operation's arrays belong together.

    arrays: the numbers of the arrays among its operands and results. factors: for each independent dim, which dim of each array it is; None
    in an array without it. summed, batch: the factors that are summed over, and those that all arrays of a matmul have. A dim in no factor
    must be whole: something moves along it.
    """

    arrays: tuple[int, ...]
    factors: tuple[_Factor, ...]
    summed: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()


def _of_dot(op: Any) -> _Dims:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batch = list(zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True))
    summed = list(zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True))
    left, right = ([d for d in range(len(type_shape(op.operands[n]))) if all(pair[n] != d for pair in batch + summed)] for n in (0, 1))
    out = itertools.count()
    factors: list[_Factor] = [(*pair, next(out)) for pair in batch]
    factors += [(d, None, next(out)) for d in left]
    factors += [(None, d, next(out)) for d in right]
    factors += [(*pair, None) for pair in summed]
    first = len(factors) - len(summed)
    return _Dims(arrays=(0, 1, 2), factors=tuple(factors), summed=tuple(range(first, len(factors))), batch=tuple(range(len(batch))))


def _of_convolution(op: Any) -> _Dims:
    n = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    groups, batches = (ir.IntegerAttr(op.attributes[name]).value for name in ("feature_group_count", "batch_group_count"))
    rows = (n.input_batch_dimension, None, n.output_batch_dimension)
    features = (None, n.kernel_output_feature_dimension, n.output_feature_dimension)
    inner = (n.input_feature_dimension, n.kernel_input_feature_dimension, None)
    if groups > 1 or batches > 1:
        # A group is a part of a dim, which no spec can name.
        return _Dims(arrays=(0, 1, 2), factors=(rows,) if batches == 1 else ())
    return _Dims(arrays=(0, 1, 2), factors=(rows, features, inner), summed=(2,))


def _of_window(op: Any) -> _Dims:
    """reduce_window has n operands, n initial values, n results; select_and_scatter an operand, a source, an initial value, a result."""
    rank = len(type_shape(op.operands[0]))
    numbers = {name: [*ir.DenseI64ArrayAttr(op.attributes[name])] if name in op.attributes else [1] * rank for name in _WINDOW}
    half = len(op.operands) // 2
    if op.name == "stablehlo.select_and_scatter":
        arrays, moving = (0, 1, 3), ("window_dimensions", "window_strides")
    else:
        arrays, moving = (*range(half), *range(2 * half, 3 * half)), ("base_dilations", "window_dilations")
    still = [d for d in range(rank) if all(numbers[name][d] == 1 for name in moving)]
    return _Dims(arrays=arrays, factors=tuple((d,) * len(arrays) for d in still))


_WINDOW = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")


def _of_pad(op: Any) -> _Dims:
    low, high, inner = ([*ir.DenseI64ArrayAttr(op.attributes[n])] for n in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    still = [d for d in range(len(low)) if low[d] >= 0 and high[d] >= 0 and inner[d] == 0]
    return _Dims(arrays=(0, 2), factors=tuple((d, d) for d in still))


_READERS: dict[str, Callable[[Any], _Dims]] = {
    "stablehlo.dot_general": _of_dot,
    "stablehlo.convolution": _of_convolution,
    "stablehlo.reduce_window": _of_window,
    "stablehlo.select_and_scatter": _of_window,
    "stablehlo.pad": _of_pad,
}


# Which layouts are wrong


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The layouts of an operation's arrays, as Shardy chooses them and as they should be. avoided: None if they are the same.

    number: of the operation among those with readers.
    """

    number: int
    arrays: tuple[int, ...]
    given: tuple[Splits, ...]
    better: tuple[Splits, ...]
    grid: AxisGrid
    mesh: Any
    avoided: Avoided | None


def _may_have_faults(module: Any) -> bool:
    """Whether it is worth asking Shardy: a matmul can be wrong only where there are two axes."""
    axes = max((sum(sdy.MeshAxisAttr(axis).size > 1 for axis in mesh.axes) for mesh in meshes_of(module.operation).values()), default=0)
    return axes > 0 and any(
        axes > 1 if op.name == "stablehlo.dot_general" else _moves(_READERS[op.name](op), op) for op in _readable(module)
    )


def _moves(dims: _Dims, op: Any) -> bool:
    """Whether something moves along a dim of an operation."""
    values = [*op.operands, *op.results]
    return any(len({factor[n] for factor in dims.factors} - {None}) < len(type_shape(values[a])) for n, a in enumerate(dims.arrays))


def _layouts(module: Any) -> list[_Found]:
    """The layouts of the operations that have readers. The module is changed as Shardy changes it."""
    meshes = meshes_of(module)
    integer = ir.IntegerType.get_signless(64)
    for number, op in enumerate(_readable(module)):
        op.attributes[_NUMBER] = ir.IntegerAttr.get(integer, number)
    choose_layouts(module)
    return [found for op in _readable(module) if (found := _layouts_of(op, meshes)) is not None]


def _readable(module: Any) -> list[Any]:
    return [op for op in operations(module) if op.name in _READERS]


def _layouts_of(op: Any, meshes: dict[str, Any]) -> _Found | None:
    dims = _READERS[op.name](op)
    values = [[*op.operands, *op.results][n] for n in dims.arrays]
    shardings = [sharding_of(value) for value in values]
    mesh = next((sharding.mesh_or_ref for sharding in shardings if sharding is not None), None)
    if mesh is None:
        return None
    grid = AxisGrid.of(meshes[mesh.value] if isinstance(mesh, ir.FlatSymbolRefAttr) else mesh, shardings, manual_axes(op))
    shapes = [type_shape(value) for value in values]
    given = tuple(grid.layout(sharding, len(shape)) for sharding, shape in zip(shardings, shapes, strict=True))
    better, avoided = given, None
    if _moves_along_split_dim(dims, given) or (dims.summed and _sums_wrongly(dims, given, grid)):
        better = _compatible(dims, given, shapes)
        name = op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name
        avoided = Avoided(name=name, line=_line_of(op), before=_shown(given), after=_shown(better))
    number = ir.IntegerAttr(op.attributes[_NUMBER]).value
    return _Found(number=number, arrays=dims.arrays, given=given, better=better, grid=grid, mesh=mesh, avoided=avoided)


def _moves_along_split_dim(dims: _Dims, layouts: Sequence[Splits]) -> bool:
    """Whether a window, a group of features or padding between elements moves along a dim that is split."""
    in_factors = [{factor[n] for factor in dims.factors} for n in range(len(layouts))]
    return any(axes and d not in in_factors[n] for n, layout in enumerate(layouts) for d, axes in enumerate(layout))


def _sums_wrongly(dims: _Dims, layouts: Sequence[Splits], grid: AxisGrid) -> bool:
    """Whether a matmul, or a convolution as one, has one of the layouts that the partitioner sums wrongly."""

    def axes(array: int, factor: int, within: Sequence[Splits] = layouts) -> tuple[SubAxis, ...]:
        d = dims.factors[factor][array]
        return () if d is None else within[array][d]

    if any(len({axes(n, f) for n in range(3)}) > 1 for f in dims.batch):
        return True
    uses = [{f for f in range(len(dims.factors)) for n in range(3) if sub_axis in axes(n, f)} for sub_axis in grid.sub_axes]
    if any(len(used) > 2 for used in uses):
        # An axis splits three different dims.
        return True
    counts = [[parts(axes(n, f)) for f in dims.summed] for n in (0, 1)]
    if counts[0] != counts[1] and all(sum(count > 1 for count in one) > 1 for one in counts):
        # Both operands split several of the dims that are summed over, but differently. A sum is forgotten.
        return True
    if sum(size > 1 for _, _, size in grid.sub_axes) > 3 and not any(_only_gathers(dims, layouts, n) for n in range(3)):
        return True
    inside = _within_equal_rows(dims, layouts)
    subsets = [subset for n in range(len(dims.summed)) for subset in itertools.combinations(dims.summed, n + 1)]
    return any(
        _reorders(grid, inside, operand, [dims.factors[f] for f in dims.batch], [dims.factors[f] for f in subset])
        for operand, subset in itertools.product((0, 1), subsets)
        if any(axes(operand, f, inside) for f in subset)
    )


def _only_gathers(dims: _Dims, layouts: Sequence[Splits], array: int) -> bool:
    """Whether a matmul needs nothing but to gather, or to cut, some dims of this one array.

    With four axes there are too many layouts to try them all, so only these count as right.
    """
    split: list[SubAxis] = []
    for factor in dims.factors:
        ways = {layouts[n][d] for n, d in enumerate(factor) if d is not None and n != array}
        mine = factor[array]
        if len(ways) > 1 or (mine is not None and ways and len({*ways, layouts[array][mine], ()}) > 2):
            return False
        split += next(iter(ways), ())
    return len(split) == len(set(split))


def _within_equal_rows(dims: _Dims, layouts: Sequence[Splits]) -> Sequence[Splits]:
    """The layouts within groups of devices that have the same rows, if the partitioner makes these groups before it looks at the sum.

    It does for the free dims of an operand that are split as in the result, if the result splits none of the other operand's.
    """
    for mine, other in ((0, 1), (1, 0)):
        free = [(f[mine], f[2]) for f in dims.factors if f[other] is None]
        equal = {
            sub_axis
            for d, out in free
            if d is not None and out is not None and layouts[mine][d] == layouts[2][out]
            for sub_axis in layouts[2][out]
        }
        others = [f[2] for f in dims.factors if f[mine] is None]
        if equal and not any(layouts[2][out] for out in others if out is not None):
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
    copies = grid.copies(out)
    if copies > 1 and copies % parts(list(sub_axes)) == 0:
        # The groups are made of devices that have the same part of the result, and are put in the operand's order.
        return False
    first, first_out = ([d for f in batch if (d := f[n]) is not None] for n in (operand, 2))
    mine = grid.groups(layouts[operand], [*first, *dims])
    kept = [d for d, axes in enumerate(out) if d not in first_out and axes and set(axes) <= sub_axes]
    return any(_is_reordered(mine, grid.groups(out, [*first_out, *kept], and_copies=copied)) for copied in (False, True))


def _is_reordered(a: list[list[int]], b: list[list[int]]) -> bool:
    """Whether two lists have the same groups of devices, and a group in two orders."""
    ordered = {frozenset(group): group for group in a}
    same = [ordered.get(frozenset(group)) for group in b]
    return len(a) == len(b) > 1 and None not in same and same != b


# Layouts that are right


def _compatible(dims: _Dims, layouts: Sequence[Splits], shapes: Sequence[tuple[int, ...]]) -> tuple[Splits, ...]:
    """Layouts in which each sub-axis splits one factor, in all arrays that have it: the factor of which it splits the most elements now."""
    # From the largest array on, whose order of axes stays.
    largest = sorted(range(len(layouts)), key=lambda n: -math.prod(shapes[n]))
    sub_axes = dict.fromkeys(sub_axis for n in largest for axes in layouts[n] for sub_axis in axes)
    sizes = [next(shapes[n][d] for n, d in enumerate(factor) if d is not None) for factor in dims.factors]
    chosen: list[list[SubAxis]] = [[] for _ in dims.factors]

    def elements(factor: int, sub_axis: SubAxis) -> int:
        return sum(math.prod(shapes[n]) for n, d in enumerate(dims.factors[factor]) if d is not None and sub_axis in layouts[n][d])

    for sub_axis in sub_axes:
        split = max(range(len(chosen)), key=lambda factor: elements(factor, sub_axis), default=None)
        if split is not None and elements(split, sub_axis) and sizes[split] % parts([*chosen[split], sub_axis]) == 0:
            chosen[split].append(sub_axis)
    better: list[list[tuple[SubAxis, ...]]] = [[()] * len(shape) for shape in shapes]
    for factor, axes in zip(dims.factors, chosen, strict=True):
        for n, d in enumerate(factor):
            if d is not None:
                better[n][d] = tuple(axes)
    return tuple(tuple(layout) for layout in better)


def _constrain(module: ir.Module, layouts: Sequence[_Found]) -> None:
    """Puts constraints around operations. What reads a result that has another layout now finds it as it was."""
    readable = _readable(module)
    for found in layouts:
        op = readable[found.number]
        name = op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name
        with ir.Location.name(f"{name}/{MARK}", childLoc=op.location):
            for n, given, better in zip(found.arrays, found.given, found.better, strict=True):
                if n < len(op.operands):
                    with ir.InsertionPoint(op):
                        op.operands[n] = found.grid.constrained(op.operands[n], better, found.mesh)
                    continue
                result = op.results[n - len(op.operands)]
                with ir.InsertionPoint.after(op):
                    first = last = found.grid.constrained(result, better, found.mesh)
                    if given != better:
                        last = found.grid.constrained(first, given, found.mesh)
                result.replace_all_uses_except(last, first.owner.operation)


def _copy(module: ir.Module) -> ir.Module:
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return ir.Module.parse(stream.getvalue())


def _line_of(op: Any) -> str:
    """The file:line of the innermost user code that an operation comes from; empty if it is not known."""
    place = op.location
    while not isinstance(place, ir.FileLineColLoc):
        if isinstance(place, ir.NameLoc):
            place = place.child_loc
        elif isinstance(place, ir.CallSiteLoc):
            place = place.callee
        else:
            return ""
    return f"{place.filename}:{place.start_line}"


def _shown(layouts: Sequence[Splits]) -> str:
    def dim(axes: Sequence[SubAxis]) -> str:
        names = [name for name, _, _ in joined(axes)]
        return "null" if not names else names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    *operands, result = ("[" + ", ".join(map(dim, layout)) + "]" for layout in layouts)
    return f"{', '.join(operands)} -> {result}"
