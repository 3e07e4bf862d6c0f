"""A reader for the text of compiled programs: computations and their instructions, and how often each one runs.

The text is XLA's own (`compiled.as_text()`); its grammar is that of xla/hlo/parser/hlo_parser.cc.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jgt.plan.lines import Lines

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\](?:\{[^}]*?S\((\d+)\)[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_DONE = ("-done", "-update")

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
"""The collectives."""

WIDTH = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
"""Bits of an element where the type's name does not say it."""


@dataclass(frozen=True)
class Array:
    """One array of a result: element type, dims, and memory space (5: the host's)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Its bytes on one device; narrow elements are packed."""
        return -(-self.size * element_bits(self.dtype) // 8)


def element_bits(dtype: str) -> int:
    """Bits of one element: f8e4m3fn has 8, bf16 16, s4 4."""
    if dtype in WIDTH:
        return WIDTH[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    if not found:
        raise ValueError(f"the element type {dtype!r} of a compiled program is unknown")
    return int(found[1])


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line. operands: names in the same computation; called: names of computations; text: all behind the operands' opening bracket."""

    name: str
    op: str
    shape: str
    text: str
    is_root: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(
            Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d), int(space or 0))
            for dtype, dims, space in _ARRAY.findall(self.shape)
        )

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        if self.op in ("parameter", "constant", "iota"):
            return ()
        return tuple(_NAME.findall(self.text[: _closing(self.text)]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs; nothing for the end of an asynchronous one."""
        if self.op.endswith(_DONE):
            return ()
        return tuple(itertools.chain.from_iterable(_NAME.findall(called) for called in _CALLED.findall(self.text)))

    @property
    def kind(self) -> str:
        """The op, an asynchronous one by its start."""
        return self.op.removesuffix("-start")

    @property
    def num_bytes(self) -> int:
        """The bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def sizes(self) -> list[int]:
        """The elements of each array in the result."""
        return [array.size for array in self.arrays]

    @cached_property
    def op_name(self) -> str:
        """Where the program that was traced has it; empty where XLA made it up."""
        found = _OP_NAME.search(self.text)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """The value of name=value. Raises KeyError."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.text)
        if not found:
            raise KeyError(f"{self.op} {self.name} has no {name}")
        return found[1].removeprefix("%")

    def dims(self, name: str) -> tuple[int, ...]:
        """The numbers of name={1,2}; none where it is absent."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.text)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    @property
    def trips(self) -> int | None:
        """How often a loop's body runs; None where XLA does not know."""
        found = _TRIPS.search(self.text)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in order: that of execution, in a scheduled program."""

    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> str:
        """The name of the result."""
        return next(i.name for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, str]:
        """Names by number."""
        return {int(i.text.partition(")")[0]): name for name, i in self.instructions.items() if i.op == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """The names of the instructions that take each one."""
        found: dict[str, list[str]] = {}
        for name, instruction in self.instructions.items():
            for operand in instruction.operands:
                found.setdefault(operand, []).append(name)
        return found


class Spot(NamedTuple):
    """An instruction: its computation and its name."""

    computation: str
    name: str


@dataclass(frozen=True)
class Module:
    """A compiled program. entry: the name of the computation that it starts with; header: its tables of source lines; name: its own."""

    computations: Mapping[str, Computation]
    entry: str
    header: Mapping[str, Mapping[int, str]]
    name: str

    @classmethod
    def of(cls, text: str) -> Module:
        """From `compiled.as_text()`."""
        computations: dict[str, Computation] = {}
        header: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        found: dict[str, Instruction] = {}
        entry = name = ""
        for line in text.splitlines():
            if line.startswith(" "):
                match = _INSTRUCTION.match(line)
                if name and match:
                    root, own, shape, op, rest = match.groups()
                    found[own] = Instruction(name=own, op=op, shape=shape, text=rest, is_root=bool(root))
            elif line.startswith("}"):
                computations[name], name = Computation(found), ""
            elif start := _COMPUTATION.match(line):
                name, found = start[1], {}
                entry = name if line.startswith("ENTRY") else entry
            elif row := _TABLE_ROW.match(line):
                table[int(row[1])] = row[2]
            elif line and not line.startswith("HloModule"):
                table = header.setdefault(line.strip(), {})
        if not entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY")
        return cls(computations, entry, header, text.removeprefix("HloModule ").partition(",")[0])

    def at(self, spot: Spot) -> Instruction:
        """The instruction at a spot."""
        return self.computations[spot.computation].instructions[spot.name]

    def instructions(self, *, within: frozenset[str] | None = None) -> Iterator[Instruction]:
        """All of them, or those of some computations."""
        for name, computation in self.computations.items():
            if within is None or name in within:
                yield from computation.instructions.values()

    @cached_property
    def spots(self) -> dict[str, Spot]:
        """The instructions by name, of which each is there once in a program."""
        return {name: Spot(at, name) for at, computation in self.computations.items() for name in computation.instructions}

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """The instructions that run each computation, with the computations that they stand in."""
        found: dict[str, list[tuple[str, Instruction]]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                for called in dict.fromkeys(instruction.called):
                    found.setdefault(called, []).append((name, instruction))
        return found

    @cached_property
    def unknown_loops(self) -> list[Instruction]:
        """The loops of which nobody knows how often they run."""
        return [i for i in self.instructions() if i.op == "while" and i.trips is None]

    def source(self, instruction: Instruction) -> str:
        """The file:line of the user's program that an instruction comes from; empty where it is not known."""
        return self.source_in(instruction.text)

    def source_in(self, metadata: str) -> str:
        """The file:line that an instruction's metadata tells."""
        return self._lines.of(metadata)

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.header)


def _closing(text: str) -> int:
    """Where the bracket that is open at the start of a text closes."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
