"""Rules for the primitives that move rows, take parts of them or work along a dim, in a table.

A rule gets an equation, the same at another batch size, and the rows of its operands, of which at least one has some. It
gives the rows of the results, or raises MixingError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jgt.jaxpr import Equation
from jgt.pipeline.indexing import Given, gather, scatter
from jgt.pipeline.rows import MixingError, Rows, copies_of, each, names, refuse_indices, shape_of, size_of, together

Rule = Callable[[Equation, Equation, Given], "Rows | list[Rows | None] | None"]


def _reshape(equation: Equation, twin: Equation, given: Given) -> Rows:
    rows = given[0]
    assert rows
    old, new = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    dim = next((d for d, (m, n) in enumerate(zip(new, shape_of(twin.outvars[0]), strict=True)) if m != n), 0)
    if rows.is_index:
        if (old[rows.dim], math.prod(old[: rows.dim])) != (new[dim], math.prod(new[:dim])):
            refuse_indices("reshape", given)
        _refuse_columns(rows)
        return rows.at(dim)
    if not rows.copies:
        return rows.at(dim)
    # Before the rows' dim stand copies of all rows, as copies in the dim itself do.
    ahead, still_ahead = math.prod(old[: rows.dim]) * rows.copies, math.prod(new[:dim])
    behind = math.prod(new[dim + 1 :])
    copies, left = divmod(ahead, still_ahead)
    if left or (copies > 1 and math.prod(old[rows.dim + 1 :]) % behind):
        raise MixingError("it reshapes the batch so that no dim of it is rows in their order (one that splits rows into groups has to come second)")
    return Rows(dim, copies)


def _refuse_columns(rows: Rows | None) -> None:
    # They are those of the last dim.
    if rows and rows.columns:
        refuse_indices("an index", [rows])


def _moved(rows: Rows | None, to: Sequence[int]) -> Rows | None:
    """`to`: where each dim of the operand goes."""
    _refuse_columns(rows)
    return rows.at(int(to[rows.dim])) if rows else None


def _transpose(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    permutation = list(equation.params["permutation"])
    return _moved(given[0], [permutation.index(d) for d in range(len(permutation))])


def _broadcast(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    return _moved(given[0], equation.params["broadcast_dimensions"])


def _without(rows: Rows, gone: set[int]) -> Rows:
    _refuse_columns(rows)
    return rows.at(rows.dim - sum(d < rows.dim for d in gone))


def _squeeze(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    rank = len(shape_of(equation.invars[0]))
    return _without(given[0], {int(d) % rank for d in equation.params["dimensions"]}) if given[0] else None


def _reduce(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    rows = together(equation, given)
    axes = set(map(int, equation.params["axes"] if "axes" in equation.params else equation.params["dimensions"]))
    return None if rows.dim in axes else _without(rows, axes)


def _along(*keys: str) -> Rule:
    """Primitives that work along the dims that one of `keys` names; without any, along the last one."""

    def rule(equation: Equation, twin: Equation, given: Given) -> Rows:
        del twin
        value = next((equation.params[key] for key in keys if key in equation.params), -1)
        rank = len(shape_of(equation.invars[0]))
        dims = {int(d) % rank for d in (value if isinstance(value, tuple | list) else (value,))}
        if any(rows and rows.dim in dims for rows in given):
            raise MixingError(f"{equation.primitive.name} works along the rows of the batch")
        return together(equation, given)

    return rule


def _concatenate(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    rows, dim = together(equation, given), int(equation.params["dimension"])
    if dim != rows.dim:
        return rows
    if rows.copies > 1 or not all(given) or len({shape_of(a) for a in equation.invars}) > 1:
        raise MixingError("it concatenates rows of the batch with others")
    return Rows(dim, len(given))


def _slice(equation: Equation, twin: Equation, given: Given) -> Rows:
    rows = given[0]
    assert rows
    _refuse_columns(rows)
    spans = []
    for e in (equation, twin):
        shape, params = shape_of(e.invars[0]), e.params
        strides = params["strides"] or (1,) * len(shape)
        spans.append(list(zip(shape, params["start_indices"], params["limit_indices"], strides, strict=True)))
    if any(a[1:] != b[1:] for d, (a, b) in enumerate(zip(*spans, strict=True)) if d != rows.dim):
        raise MixingError("slice takes another part at another batch size")
    return _part(rows, spans[0][rows.dim], spans[1][rows.dim])


Span = tuple[int, int, int, int]


def _part(rows: Rows, span: Span, twin: Span) -> Rows:
    """Size, start, limit and stride of what is taken of the rows' dim, at two batch sizes."""
    if all(s[1:] == (0, s[0], 1) for s in (span, twin)):
        return rows
    refuse_indices("slice", [rows])
    size, start, _, stride = span
    if stride > 1 and rows.copies < 2 and all(s[0] % stride == 0 and s[1] == start < stride and s[2] > s[0] - stride + start for s in (span, twin)):
        return rows  # the same one of each `stride` neighbours
    chosen = set()
    for size, start, limit, stride in (span, twin):
        each_copy = size // max(rows.copies, 1)
        if rows.copies < 2 or stride != 1 or start % each_copy or limit % each_copy:
            raise MixingError("it takes some rows of the batch and leaves the others")
        chosen.add((start // each_copy, limit // each_copy))
    if len(chosen) > 1:
        raise MixingError("slice takes another part at another batch size")
    ((first, last),) = chosen
    return Rows(rows.dim, last - first)


def _split(equation: Equation, twin: Equation, given: Given) -> list[Rows | None]:
    rows, axis = given[0], int(equation.params["axis"])
    assert rows
    _refuse_columns(rows)
    if axis != rows.dim:
        if tuple(equation.params["sizes"]) != tuple(twin.params["sizes"]):
            raise MixingError("split takes another part at another batch size")
        return each(rows, equation.outvars)
    spans: list[list[Span]] = []
    for e in (equation, twin):
        limits = [int(sum(e.params["sizes"][: i + 1])) for i in range(len(e.outvars))]
        spans.append([(size_of(e.invars[0], axis), limit - int(n), limit, 1) for n, limit in zip(e.params["sizes"], limits, strict=True)])
    return [_part(rows, a, b) for a, b in zip(*spans, strict=True)]


def _dot(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    refuse_indices("dot_general", given)
    contracting, batch = equation.params["dimension_numbers"]
    copies = copies_of("dot_general", given)
    found: set[int] = set()
    summed: list[int | None] = []
    offset = len(batch[0])
    for atom, rows, own, shared in zip(equation.invars, given, contracting, batch, strict=True):
        free = [d for d in range(len(shape_of(atom))) if d not in (*own, *shared)]
        if rows:
            summed.append(list(own).index(rows.dim) if rows.dim in own else None)
            if rows.dim not in own:
                found.add(list(shared).index(rows.dim) if rows.dim in shared else offset + free.index(rows.dim))
        offset += len(free)
    if found and summed == [None] * len(summed) and len(found) == 1:
        return Rows(found.pop(), copies)
    if not found and len(summed) == 2 and len(set(summed)) == 1:
        return None
    raise MixingError("it multiplies rows of the batch with each other")


def _whole(*, update: bool) -> Rule:
    """dynamic_slice and dynamic_update_slice: of a part of each row."""

    def rule(equation: Equation, twin: Equation, given: Given) -> Rows:
        del twin
        rows = given[0]
        other = equation.invars[1] if update else equation.outvars[0]
        if rows is None or (update and given[1] is None) or size_of(other, rows.dim) != size_of(equation.invars[0], rows.dim):
            raise MixingError(f"{equation.primitive.name} takes some rows of the batch and leaves the others")
        return together(equation, given)

    return rule


def _pad(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    rows = given[0]
    if rows is None or tuple(equation.params["padding_config"][rows.dim]) != (0, 0, 0):
        raise MixingError("it adds rows to the batch")
    return together(equation, given)


def _convolution(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    numbers, rows = equation.params["dimension_numbers"], given[0]
    refuse_indices("conv_general_dilated", given)
    if rows is None or given[1] or rows.dim != numbers.lhs_spec[0] or equation.params["batch_group_count"] != 1:
        raise MixingError("it is a convolution over the rows of the batch")
    return rows.at(numbers.out_spec[0])


_WINDOW = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}


def _window(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    rows = together(equation, given)
    for key, alone in _WINDOW.items():
        value = equation.params.get(key)
        if value is not None and value[rows.dim] != alone:
            raise MixingError(f"{equation.primitive.name} has a window over the rows of the batch")
    return rows


def _barrier(equation: Equation, twin: Equation, given: Given) -> list[Rows | None]:
    del equation, twin
    return list(given)


def _stack(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    rows = together(equation, given)
    return rows.at(rows.dim + (int(equation.params["axis"]) <= rows.dim))


def _unstack(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    del twin
    axis = int(equation.params["axis"])
    return _without(given[0], {axis}) if given[0] and given[0].dim != axis else None


def _tile(equation: Equation, twin: Equation, given: Given) -> Rows:
    del twin
    rows = together(equation, given)
    times = int(equation.params["reps"][rows.dim])
    return Rows(rows.dim, rows.copies * times)


def _table() -> dict[str, Rule]:
    windows = "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add"
    return {
        **dict.fromkeys(names("reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"), _reduce),
        **dict.fromkeys(names("cumsum cumprod cummax cummin cumlogsumexp top_k"), _along("axis")),
        **dict.fromkeys(names(windows), _window),
        **dict.fromkeys(names("scatter scatter-add scatter_add scatter-sub scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max"), scatter),
        "approx_top_k": _along("reduction_dimension"),
        "broadcast_in_dim": _broadcast,
        "concatenate": _concatenate,
        "conv_general_dilated": _convolution,
        "dot_general": _dot,
        "dynamic_slice": _whole(update=False),
        "dynamic_update_slice": _whole(update=True),
        "gather": gather,
        "optimization_barrier": _barrier,
        "pad": _pad,
        "reshape": _reshape,
        "rev": _along("dimensions"),
        "slice": _slice,
        "sort": _along("dimension"),
        "split": _split,
        "squeeze": _squeeze,
        "stack": _stack,
        "tile": _tile,
        "transpose": _transpose,
        "unstack": _unstack,
    }


RULES: dict[str, Rule] = _table()
