"""The text of a compiled program, read into computations and their instructions.

XLA prints a program as a header, tables of source lines (two of them side by side here), and computations. ENTRY marks the first to run:

    HloModule jit_step, is_scheduled=true, entry_computation_layout={...}, num_partitions=8

    FileNames                       FileLocations
    1 "my_step.py"                  1 {file_name_id=1 function_name_id=1 line=97 end_line=97 column=4 end_column=4}
    2 "my_model.py"                 2 {file_name_id=2 function_name_id=2 line=44 end_line=44 column=19 end_column=19}
    StackFrames
    1 {file_location_id=1 parent_frame_id=1}
    2 {file_location_id=2 parent_frame_id=2}

    %body (p: f32[4]) -> f32[4] {
      %p = f32[4]{0} parameter(0)
      ROOT %neg = f32[4]{0} negate(%p), metadata={op_name="jit(step)/while/body/neg" stack_frame_id=2}
    }

    ENTRY %main (x: f32[4]) -> f32[4] {
      %x = f32[4]{0} parameter(0)
      ROOT %loop = f32[4]{0} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}
    }

Scopes are not nested: a loop, a branch or a fusion names the computation that it runs (`body=%body`). ROOT marks a computation's
result. Because the program `is_scheduled`, the order of the lines is the order of execution. Frame 2, of `neg`, is line 44 of my_model.py,
called from frame 1, line 97 of my_step.py: XLA prints a parent as its frame's number plus one, so that a frame without a parent appears to
be its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jgt.planner.hlo.instruction import Instruction

_FRAME = re.compile(r"stack_frame_id=(\d+)")
_JGT = str(Path(__file__).parents[2]) + "/"
"""The folder of jgt's own files. jgt rewrites programs, but what it rewrote still comes from where the user wrote it."""


class Lines:
    """The source lines of a program. tables: the rows by number of FileNames, FileLocations and StackFrames."""

    def __init__(self, tables: Mapping[str, Mapping[int, str]]):
        self._tables = tables

    def of(self, metadata: str) -> str:
        """The file:line for an instruction's metadata; empty if it has none."""
        found = _FRAME.search(metadata)
        return self._frames.get(int(found[1]), "") if found else ""

    @cached_property
    def _frames(self) -> dict[int, str]:
        rows = {number: _fields(row) for number, row in self._tables.get("StackFrames", {}).items()}
        # Only if parents are printed plus one does some frame appear to be its own parent.
        shift = int(any(row.get("parent_frame_id") == number for number, row in rows.items()))
        locations = {number: _fields(row) for number, row in self._tables.get("FileLocations", {}).items()}
        files = {number: row.strip('"') for number, row in self._tables.get("FileNames", {}).items()}

        def chain(number: int) -> Iterator[str]:
            seen: set[int] = set()
            while number in rows and number not in seen:
                seen.add(number)
                location = locations[rows[number]["file_location_id"]]
                yield f"{files[location['file_name_id']]}:{location['line']}"
                number = rows[number].get("parent_frame_id", 0) - shift

        return {number: _users_line(list(chain(number))) for number in rows}


def _users_line(lines: list[str]) -> str:
    """Among the lines of a stack, innermost first: the first of the user's, otherwise jgt's, otherwise the innermost."""
    if lines[0].startswith(f"{_JGT}planner/"):
        # The instruction belongs to the step as a whole, not to any line: the frame is the planner's call that compiled it.
        return ""
    ours = [line for line in lines if "site-packages" not in line]
    return _relative(next((line for line in ours if not line.startswith(_JGT)), (ours or lines)[0]))


def _relative(source: str) -> str:
    """A path below the current directory, as one would type it; other paths are unchanged."""
    return source.removeprefix(f"{Path.cwd()}/")


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


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
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        return {i.parameter_number: i for i in self.instructions.values() if i.op == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that have an instruction as an operand, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users


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
                    instructions[name] = Instruction(name=name, op=op, shape=shape, text=rest, is_root=bool(root), computation=computation)
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

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction."""
        inside = self.computations[instruction.computation].instructions
        return [inside[name] for name in instruction.operands]

    def users(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that have an instruction as an operand."""
        return self.computations[instruction.computation].users.get(instruction.name, [])

    def instructions(self, *, within: frozenset[str] | None = None) -> Iterator[Instruction]:
        """The instructions of all computations, or of those named in `within`."""
        for name, computation in self.computations.items():
            if within is None or name in within:
                yield from computation.instructions.values()

    @cached_property
    def named(self) -> dict[str, Instruction]:
        """Each instruction by its name, which XLA keeps unique within a program."""
        return {instruction.name: instruction for instruction in self.instructions()}

    @cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """The instructions that run a computation, by its name."""
        callers: dict[str, list[Instruction]] = {}
        for instruction in self.instructions():
            for called in dict.fromkeys(instruction.called):
                callers.setdefault(called, []).append(instruction)
        return callers

    def source(self, metadata: str) -> str:
        """The file:line of the user's program for an instruction's text, or for a warning of XLA's about one; empty if it is unknown."""
        return self.lines.of(metadata)
