"""One instruction of a compiled program: what a line of XLA's text says.

XLA prints an instruction as a name, the shape of the result, the op, the operands, and attributes in no fixed order. This is one line,
broken here to fit:

    %all-gather-start = (f32[2,32]{1,0}, f32[16,32]{1,0}) all-gather-start(%param.1), channel_id=1, replica_groups=[1,8]<=[8],
        dimensions={0}, metadata={op_name="jit(step)/jvp(sig.linear)/dot_general" stack_frame_id=5}

Names are unique in a program, and often, but not always, begin with the op. The result is a tuple of two arrays; `{1,0}` is a layout, which
changes no size and is ignored. Shapes are local: the part of an array on one device. `op_name` is JAX's name stack, in which the scope
`sig.linear` is the signal.

A collective is one instruction or a pair, `all-gather-start` and `all-gather-done`, between which the device does other work. A start
returns its operands beside its results. XLA can also wrap any op in `async-start`, `async-update` and `async-done`, all three of which name
the same computation; only the start runs it. The grammar is XLA's: https://github.com/openxla/xla/blob/main/xla/hlo/parser/hlo_parser.cc.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# `bf16[16,32]`, a scalar `f32[]`, and a dynamic dim `s32[<=8]`; the layout behind the dims is not read.
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\]")
# The memory in which an array is, in its layout: `{0:S(5)}`, or none for the device's own.
_MEMORY = re.compile(r"(?:pred|token|opaque|[a-z]+\d+\w*)\[[\d,<=]*\](?:\{[^}]*?S\((\d+)\)[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# One computation (`body=%body`), or several (`branch_computations={%first, %second}`).
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""The bits of one element, for the types that do not have them in their name."""

COLLECTIVES = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast"
"""The ops that exchange data between devices, without the suffix of an asynchronous pair."""

HOST_SPACE = 5
"""XLA's number of the host's memory; 0 is the device's."""


class Array(NamedTuple):
    """One array of a result, as one device has it: its element type and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """The size in bytes, rounded up: elements narrower than a byte are packed."""
        # The name of a type contains its bits: f8e4m3fn has 8, bf16 has 16, s4 has 4.
        named = re.search(r"\d+", self.dtype)
        return -(-self.size * (int(named[0]) if named else _BITS[self.dtype]) // 8)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    shape: the shape of the result, as text. text: the rest of the line, from the first operand to the last attribute. computation: the name
    of the computation that it is part of.
    """

    name: str
    op: str
    shape: str
    text: str
    is_root: bool = False
    computation: str = ""

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, with tuples flattened. A dynamic dim, written `<=8`, counts as its bound."""
        return tuple(
            Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(self.shape)
        )

    @property
    def memories(self) -> tuple[int, ...]:
        """The number of the memory in which each array of the result is."""
        return tuple(int(space or 0) for space in _MEMORY.findall(self.shape))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands, which are instructions of the same computation."""
        # Their brackets contain a number, or values that may look like names.
        if self.op in ("parameter", "constant", "iota"):
            return ()
        return tuple(_NAME.findall(self.text[: _closing_bracket(self.text)]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs: a fusion's body, a loop's body and condition, a conditional's branches.

        The update and the done of an asynchronous computation name it too, but only the start runs it.
        """
        if self.op.endswith(("-done", "-update")):
            return ()
        return tuple(itertools.chain.from_iterable(_NAME.findall(called) for called in _CALLED.findall(self.text)))

    @property
    def kind(self) -> str:
        """The op without the suffix `-start`, so that both forms of a collective are of one kind, and a pair counts once."""
        return self.op.removesuffix("-start")

    @cached_property
    def num_bytes(self) -> int:
        """The size of the result in bytes, on one device."""
        return sum(array.num_bytes for array in self.arrays)

    @cached_property
    def op_name(self) -> str:
        """JAX's name stack of the traced equation; empty for most instructions that XLA itself added."""
        found = OP_NAME.search(self.text)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """The value of `name=value`. Raises KeyError if the instruction does not have the attribute."""
        # The word boundary keeps `index` from being found inside a longer name.
        # A value ends at a comma or a space, unless it is in braces, where both may occur.
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.text)
        if not found:
            raise KeyError(f"{self.op} {self.name} has no {name}")
        return found[1].removeprefix("%")

    def dims(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute like `lhs_contracting_dims={1,2}`; empty if it is absent."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.text)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    @property
    def parameter_number(self) -> int:
        """The position of a `parameter(2)` among its computation's parameters."""
        return int(self.text.partition(")")[0])

    @property
    def trip_count(self) -> int | None:
        """The trips of a loop, as XLA wrote them into `backend_config`: `"known_trip_count":{"n":"5"}`; None if it did not.

        `jgt.planner.hlo.trips` finds more counts.
        """
        found = _TRIP_COUNT.search(self.text)
        return int(found[1]) if found else None


def _closing_bracket(text: str) -> int:
    """The index of the bracket that closes the operands; the one that opens them is not part of the text."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
