"""The collectives of a compiled program, counted from its text: enough to compare two programs."""

from __future__ import annotations

import re
from collections import Counter

_OP = re.compile(r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def collectives(text: str) -> Counter[tuple[str, int]]:
    """(kind, bytes of the result on one device) → how many stand in the text of a compiled program."""
    found: Counter[tuple[str, int]] = Counter()
    for shapes, kind in _OP.findall(text):
        found[kind, sum(_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(shapes))] += 1
    return found


def _bytes(dtype: str, dims: str) -> int:
    size = _WIDTH[dtype]
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size
