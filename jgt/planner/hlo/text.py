"""The text of a compiled program, read into computations and their instructions.

XLA prints a program as a header and a list of computations, functions of one another; the one marked ENTRY is where it begins:

    HloModule jit_step, is_scheduled=true, entry_computation_layout={...}, num_partitions=8

    %body (p: f32[4]) -> f32[4] {
      %p = f32[4]{0} parameter(0)
      ROOT %neg = f32[4]{0} negate(%p), metadata={op_name="jit(step)/while/body/neg" stack_frame_id=3}
    }

    ENTRY %main (x: f32[4]) -> f32[4] {
      %x = f32[4]{0} parameter(0)
      ROOT %loop = f32[4]{0} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}
    }

Here the module is named `jit_step` and has the computations `body` and `main`. There are no nested scopes: a loop, a branch or a fusion
names the computation that it runs (`body=%body`), and whoever wants to know in what context an instruction runs walks from callers to
callees (`Module.callers`, and `graph`). ROOT marks a computation's result. Because the program `is_scheduled`, the order of the
lines is the order of execution. Tables of source files and stack frames stand between the header and the first computation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.lines import Lines

# `%body (p: f32[4]) -> f32[4] {`
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# `  ROOT %neg = f32[4]{0} negate(%p), ...`. A shape may contain spaces and brackets; the op is the first word in front of a bracket.
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


@dataclass(frozen=True)
class Computation:
    """The instructions of one computation by name; in a scheduled program, in the order of execution."""

    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> str:
        """The name of the instruction whose value the computation returns."""
        return next(i.name for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, str]:
        """The names of the parameters by their number."""
        return {i.parameter_number: name for name, i in self.instructions.items() if i.op == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """The names of the instructions that have an instruction as an operand, by its name."""
        users: dict[str, list[str]] = {}
        for name, instruction in self.instructions.items():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(name)
        return users


class Spot(NamedTuple):
    """Where an instruction is: the name of its computation, and its own name."""

    computation: str
    name: str


@dataclass(frozen=True)
class Module:
    """A compiled program. entry: the computation that it begins with; lines: its source lines."""

    computations: Mapping[str, Computation]
    entry: str
    lines: Lines
    name: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Reads `compiled.as_text()`. Raises ValueError for a text without an entry computation."""
        computations: dict[str, Computation] = {}
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        instructions: dict[str, Instruction] = {}
        entry = computation = ""
        # Indentation alone separates instructions from the rest: a line of a computation, and no other, begins with a space.
        for line in text.splitlines():
            if line.startswith(" "):
                match = _INSTRUCTION.match(line)
                if computation and match:
                    root, name, shape, op, rest = match.groups()
                    # Programs are large, and few lines are ever asked about: the rest of a line is parsed on demand.
                    instructions[name] = Instruction(name=name, op=op, shape=shape, text=rest, is_root=bool(root))
            elif line.startswith("}"):
                # Python assigns from left to right: the name is used before it is cleared.
                computations[computation], computation = Computation(instructions), ""
            elif start := _COMPUTATION.match(line):
                computation, instructions = start[1], {}
                entry = computation if line.startswith("ENTRY") else entry
            elif row := _TABLE_ROW.match(line):
                table[int(row[1])] = row[2]
            elif line and not line.startswith("HloModule"):
                # The name of a table, such as StackFrames; its rows follow.
                table = tables.setdefault(line.strip(), {})
        if not entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY")
        return cls(computations, entry, Lines(tables), text.removeprefix("HloModule ").partition(",")[0])

    def at(self, spot: Spot) -> Instruction:
        """The instruction at a spot."""
        return self.computations[spot.computation].instructions[spot.name]

    def instructions(self, *, within: frozenset[str] | None = None) -> Iterator[Instruction]:
        """The instructions of all computations, or of those named in `within`."""
        for name, computation in self.computations.items():
            if within is None or name in within:
                yield from computation.instructions.values()

    @cached_property
    def spots(self) -> dict[str, Spot]:
        """The spot of each instruction by its name, which XLA keeps unique within a program."""
        return {name: Spot(at, name) for at, computation in self.computations.items() for name in computation.instructions}

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """The instructions that run a computation, by its name, each with the name of the computation that it is part of."""
        callers: dict[str, list[tuple[str, Instruction]]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.instructions.values():
                for called in dict.fromkeys(instruction.called):
                    callers.setdefault(called, []).append((name, instruction))
        return callers

    def source(self, metadata: str) -> str:
        """The file:line of the user's program for an instruction's text, or for a warning of XLA's about one; empty if it is unknown."""
        return self.lines.of(metadata)
