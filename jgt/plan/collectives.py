"""The collectives of a compiled program: bytes on the wire, axes, and the signal that each operand belongs to."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jgt.plan.counts import times
from jgt.plan.groups import Span, span_of
from jgt.plan.hlo import KINDS, Array, Instruction, Module, Spot
from jgt.plan.neighbours import told
from jgt.plan.origin import NONE, Origin, Phase, combined, phase_of


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives that differ in nothing that is told here.

    bytes: what one device sends in one of them, of a ring: (n-1)/n of the whole array for all-gather, reduce-scatter and
    all-to-all over n devices, twice that for all-reduce, the operand for collective-permute. count: how many run in a step.
    group: how many devices take part. source: file:line of the traced program.
    """

    kind: str
    dtype: str
    bytes: int
    count: int
    axes: tuple[str, ...]
    signal: str
    phase: Phase
    source: str
    group: int

    @property
    def total_bytes(self) -> int:
        """What one device sends in a step."""
        return self.bytes * self.count


@dataclass(frozen=True)
class Piece:
    """A part of a collective's data that belongs to one operand of the traced program: what it is made of, and what takes it."""

    array: Array
    op_name: str
    made_of: Spot
    taken_as: tuple[Spot, ...]


def collectives(module: Module, mesh: Mapping[str, int], num_devices: int) -> tuple[Collective, ...]:
    """All collectives of a program, the largest first. Raises ValueError for groups that cannot be read."""
    found: collections.Counter[Collective] = collections.Counter()
    for name, count in times(module).items():
        for instruction in module.computations[name].instructions.values() if count else ():
            if instruction.kind in KINDS:
                for one in _read(module, name, instruction, span_of(instruction, mesh, num_devices)):
                    found[one] += round(count)
    rows = [replace(one, count=count) for one, count in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row.signal, row.kind, row.phase, row.source)))


def _read(module: Module, at: str, instruction: Instruction, span: Span) -> Iterator[Collective]:
    """One entry, not counted yet, for each piece of a collective."""
    found = list(pieces(module, at, instruction))
    if instruction.kind == "all-to-all" and len(instruction.operands) > 1:
        # A block for each device: together one array of the traced program.
        found = [replace(found[0], array=Array(found[0].array.dtype, (sum(piece.array.size for piece in found),)))]
    for piece in found:
        origin, source = _told(module, instruction, piece, is_alone=len(found) == 1)
        yield Collective(
            kind=instruction.kind,
            dtype=piece.array.dtype,
            bytes=wire_bytes(instruction.kind, piece.array.num_bytes, span.size),
            count=0,
            axes=span.axes,
            signal=NONE if origin is None else origin.signal,
            phase=phase_of(piece.op_name) if origin is None else origin.phase,
            source=source,
            group=span.size,
        )


def _told(module: Module, collective: Instruction, piece: Piece, *, is_alone: bool) -> tuple[Origin | None, str]:
    """A piece's origin and source, from its name or its neighbours'."""
    origin, spot = told(module, piece.op_name, [piece.made_of], piece.taken_as)
    own = module.source(collective)
    other = module.source(module.at(spot)) if spot else ""
    return origin, (own or other) if is_alone else (other or own)


def is_collective(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction sends, by itself or as the start of an asynchronous computation that does."""
    inner = instruction.called if instruction.op.endswith("-start") else ()
    return instruction.kind in KINDS or any(i.kind in KINDS for called in inner for i in module.computations[called].instructions.values())


def wire_bytes(kind: str, operand: int, group: int) -> int:
    """What a device sends for an operand of so many bytes, over rings of `group` devices (see `Collective`)."""
    if group == 1:
        return 0
    if kind == "all-gather":
        return operand * (group - 1)
    if kind in ("collective-permute", "collective-broadcast"):
        return operand
    return -(-operand * (group - 1) * (2 if kind == "all-reduce" else 1) // group)


def pieces(module: Module, at: str, collective: Instruction) -> Iterator[Piece]:
    """The data of a collective, operand by operand; several arrays that XLA put into one are taken apart again."""
    instructions = module.computations[at].instructions
    operands = [instructions[name] for name in collective.operands]
    if collective.kind == "ragged-all-to-all":
        operands = operands[:1]
    for index, (operand, name) in enumerate(zip(operands, combined(collective.op_name, len(operands)), strict=True)):
        parts = list(_concatenated(module, at, operand))
        if len(parts) > 1:
            yield from (replace(part, op_name=part.op_name or name) for part in parts)
        else:
            taken = tuple(Spot(at, spot) for spot in _results(module, at, collective, index, len(operands)))
            yield from (Piece(array, name, Spot(at, operand.name), taken) for array in operand.arrays)


def _results(module: Module, at: str, collective: Instruction, index: int, num_operands: int) -> Iterator[str]:
    """The instructions that hold the result of one operand."""
    computation = module.computations[at]
    done = [name for name in computation.users.get(collective.name, ()) if computation.instructions[name].op.endswith("-done")]
    for whole in done or [collective.name]:
        if num_operands == 1:
            yield whole
            continue
        for name in computation.users.get(whole, ()):
            user = computation.instructions[name]
            if user.op == "get-tuple-element" and user.attribute("index") == str(index):
                yield name


def _concatenated(module: Module, at: str, operand: Instruction) -> Iterator[Piece]:
    """The arrays that a value is the concatenation of."""
    if operand.op == "fusion":
        at = operand.called[0]
        operand = module.computations[at].instructions[module.computations[at].root]
    instructions = module.computations[at].instructions
    while operand.op in ("bitcast", "reshape", "copy"):
        operand = instructions[operand.operands[0]]
    if operand.op == "concatenate":
        for name in operand.operands:
            part = instructions[name]
            yield Piece(part.arrays[0], part.op_name, Spot(at, name), ())
