"""The problems of a rule about long sequences with the sizes and the attention that it meets, as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, num_parts
from jgt.program.places import line_of
from jgt.replacements.context.proof import Attention
from jgt.replacements.context.region import Region
from jgt.rules import ContextRule


def shape_problems(rule: ContextRule, region: Region, dims: Dims, sizes: Mapping[str, int]) -> Iterator[str]:
    q, k, v = map(jx.shape_of, region.rows)
    names = ", ".join(rule.between[:3])
    if any(len(shape) != 4 for shape in (q, k, v)) or q[:2] != k[:2] or k[:3] != v[:3] or q[2] % k[2]:
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        yield f"{rule.where}: context: {names} have to be [b, s, heads, size], of equal b and s, but they are {shapes}"
        return
    if region.reader is not None:
        yield (
            f"{rule.where}: context: between {names} and {rule.between[-1]} a value is made that "
            f"{line_of(region.reader) or region.reader.primitive.name} reads, too. It would be one of the whole sequence"
        )
    heads = num_parts(dims[2], sizes) * (sizes[rule.axis] if rule.method == "ulysses" else 1)
    for count, what in ((q[2], "heads"), (k[2], "key heads")):
        if count % heads:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            yield (
                f"{rule.where}: context: {count} {what} do not divide by {heads}, as {rule.method} over {rule.axis}={sizes[rule.axis]} "
                f"needs it. Sizes that fit: {fits}; ring and gather leave the heads alone"
            )
    is_twice = rule.order in ("zigzag", "zigzag_rows")
    if q[1] % (sizes[rule.axis] * (2 if is_twice else 1)):
        yield _length(rule, q[1], sizes[rule.axis], is_twice=is_twice)


def _length(rule: ContextRule, length: int, size: int, *, is_twice: bool) -> str:
    n = 2 * size if is_twice else size
    below, above = length // n * n, -(-length // n) * n
    twice = " (zigzag order: twice the axis)" if is_twice else ""
    near = " or ".join(str(one) for one in (below, above) if one)
    return f"{rule.where}: context: a sequence of {length} does not divide by {n}{twice}. Take {near}"


def is_zigzag(rule: ContextRule, attention: Attention) -> bool:
    if rule.order == "zigzag_rows":
        return attention.is_causal
    return rule.order == "zigzag" or (rule.order is None and rule.method == "ring" and attention.is_causal and not attention.window)


def order_problems(rule: ContextRule, attention: Attention, length: int, sizes: Mapping[str, int]) -> Iterator[str]:
    if rule.order == "zigzag_rows":
        yield from _row_problems(rule, attention)
    elif rule.order == "zigzag" and (not attention.is_causal or rule.method == "ulysses"):
        why = "the attention is not causal" if rule.method != "ulysses" else "each device has the whole sequence in ulysses"
        yield f"{rule.where}: context: order: zigzag would change nothing, since {why}. Write order: plain"
    elif is_zigzag(rule, attention) and length % (2 * sizes[rule.axis]):
        yield f"{_length(rule, length, sizes[rule.axis], is_twice=True)}, or write order: plain"


def _row_problems(rule: ContextRule, attention: Attention) -> Iterator[str]:
    """Attention for which rows have to be in plain order."""
    what = f"{rule.where}: context: rows arrive in zigzag order, but"
    if rule.method == "ulysses":
        yield f"{what} in ulysses each device has the whole sequence. Use ring or gather, or rows in plain order"
    elif not attention.is_causal and not attention.is_plain:
        yield f"{what} the attention is neither causal nor without a mask. Use rows in plain order"
    if any({"queries", "keys"} <= set(one.labels) for one in attention.pairs.operands):
        yield f"{what} a mask of all pairs is made outside of the attention. Make it inside, or use rows in plain order"
