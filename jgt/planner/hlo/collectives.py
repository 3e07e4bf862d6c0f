"""The collectives of a compiled program: what each sends, how often, over which axes, and for which signal.

A line of XLA's text is not a row of the result. This line, for example, runs in a loop of five iterations:

    %all-reduce.2 = (f32[], f32[32,16]{1,0}) all-reduce(%loss, %dot.1), channel_id=2, replica_groups=[1,8]<=[8],
        use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/(jvp(sig.head)/reduce_sum:transpose(jvp(sig.mlp))/dot)"}

XLA combined two all-reduces into one. They are taken apart again, operand by operand, because each has its own signal: 4 bytes of `head`,
forward, and 2048 bytes of `mlp`, backward, both over all eight devices, and both counted five times. Where XLA instead concatenated the
arrays into one operand, the parts of the concatenation are the pieces.

Bytes are what one device sends if a ring does the work (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
MPICH, IJHPCA 19, 2005). `wire_bytes` has the formulas.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from jgt.planner.hlo.graph import runs_per_step
from jgt.planner.hlo.groups import Participants, participants_of
from jgt.planner.hlo.instruction import COLLECTIVES, Array, Instruction
from jgt.planner.hlo.origin import NONE, Origin, Phase, find_origin, operand_names, phase_of
from jgt.planner.hlo.text import Module


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of a step that agree in every field but `count`.

    bytes: the bytes that a device sends in one of them (see `wire_bytes`). count: the number in a step. axes: the mesh axes crossed.
    group: the number of devices that exchange data with each other. source: file:line of the traced program.
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
        """The bytes that a device sends in a step."""
        return self.bytes * self.count


class Piece(NamedTuple):
    """The part of a collective's data that was one array of the traced program.

    operand: the instruction that produced it; results: the instructions that have it after the exchange.
    """

    array: Array
    op_name: str
    operand: Instruction
    results: tuple[Instruction, ...]


def collectives(module: Module, mesh: Mapping[str, int], num_devices: int, further_rounds: int = 0) -> tuple[Collective, ...]:
    """The collectives of a program, those that send most first. Raises ValueError for groups in an unknown notation.

    further_rounds: the rounds of each exchange of experts after its first.
    """
    counts: collections.Counter[Collective] = collections.Counter()
    for name, runs in runs_per_step(module, further_rounds).items():
        for instruction in module.computations[name].instructions.values() if runs else ():
            # The `-done` of a pair is of another kind, so a pair counts once.
            if instruction.kind in COLLECTIVES:
                for row in _rows(module, instruction, participants_of(instruction, mesh, num_devices)):
                    # A branch that 2 of 3 visits take runs 8 times in a loop of 12. Fractions of a run are rounded.
                    counts[row] += round(runs)
    rows = [replace(row, count=count) for row, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row.signal, row.kind, row.phase, row.source)))


def _rows(module: Module, instruction: Instruction, participants: Participants) -> Iterator[Collective]:
    """One row for each piece of a collective, with a count of 0: the caller adds up equal rows."""
    parts = list(pieces(module, instruction))
    if instruction.kind == "all-to-all" and len(instruction.operands) > 1:
        # XLA for CPU passes a separate operand for each device: together they are one array of the traced program.
        parts = [parts[0]._replace(array=Array(parts[0].array.dtype, (sum(piece.array.size for piece in parts),)))]
    for piece in parts:
        origin, source = _origin_and_source(module, instruction, piece, is_alone=len(parts) == 1)
        yield Collective(
            kind=instruction.kind,
            dtype=piece.array.dtype,
            bytes=wire_bytes(instruction.kind, piece.array.num_bytes, participants.size),
            count=0,
            axes=participants.axes,
            signal=NONE if origin is None else origin.signal,
            phase=phase_of(piece.op_name) if origin is None else origin.phase,
            source=source,
            group=participants.size,
        )


def _origin_and_source(module: Module, collective: Instruction, piece: Piece, *, is_alone: bool) -> tuple[Origin | None, str]:
    """The origin and the source line of a piece, by its name or its neighbours'.

    A combined collective has the line of one of its pieces, so for the others a neighbour's line comes first.
    """
    origin, neighbour = find_origin(module, piece.op_name, [piece.operand], piece.results)
    collectives_line = module.source(collective.text)
    neighbours_line = module.source(neighbour.text) if neighbour else ""
    return origin, (collectives_line or neighbours_line) if is_alone else (neighbours_line or collectives_line)


def is_collective(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or starts an asynchronous computation that contains one."""
    inner = instruction.called if instruction.op.endswith("-start") else ()
    called = [i for name in inner for i in module.computations[name].instructions.values()]
    return any(i.kind in COLLECTIVES for i in (instruction, *called))


def wire_bytes(kind: str, operand_bytes: int, group: int) -> int:
    """The bytes that a device in a ring of `group` devices sends for its operand of this size.

    An all-gather's operand is one n-th of the whole array, which the device and its predecessors pass on n-1 times. The operand of
    the others is the whole array. A permutation sends its operand once.
    """
    # A device alone copies, and sends nothing.
    if group == 1:
        return 0
    if kind == "all-gather":
        return operand_bytes * (group - 1)
    if kind in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    # Rounded up: 4 bytes over 8 devices are not nothing.
    return -(-operand_bytes * (group - 1) * (2 if kind == "all-reduce" else 1) // group)


def pieces(module: Module, collective: Instruction) -> Iterator[Piece]:
    """The data of a collective, operand by operand, with concatenated operands split into their parts."""
    operands = module.operands(collective)
    if collective.kind == "ragged-all-to-all":
        # Rows, the buffer for them, and the offsets and sizes of the blocks. The larger of rows and buffer has room for whatever may come.
        array = min((operand.arrays[0] for operand in operands[:2]), key=lambda array: array.num_bytes)
        yield Piece(array, collective.op_name, operands[0], tuple(_results(module, collective, 0, 1)))
        return
    for index, (operand, name) in enumerate(zip(operands, operand_names(collective.op_name, len(operands)), strict=True)):
        parts = list(_concatenated(module, operand))
        if len(parts) > 1:
            # Their results are slices of one array, which lead to no single user: names and producers have to do.
            yield from (part._replace(op_name=part.op_name or name) for part in parts)
        else:
            results = tuple(_results(module, collective, index, len(operands)))
            yield from (Piece(array, name, operand, results) for array in operand.arrays)


def _results(module: Module, collective: Instruction, index: int, num_operands: int) -> Iterator[Instruction]:
    """The instructions with the result for one operand: the done of an asynchronous pair, and of several results the element."""
    done = [user for user in module.users(collective) if user.op.endswith("-done")]
    for whole in done or [collective]:
        if num_operands == 1:
            yield whole
            continue
        for user in module.users(whole):
            if user.op == "get-tuple-element" and user.attribute("index") == str(index):
                yield user


def _concatenated(module: Module, operand: Instruction) -> Iterator[Piece]:
    """The arrays that an operand is a concatenation of, whether by an instruction or inside a fusion; none if it is not one."""
    if operand.op == "fusion":
        operand = module.computations[operand.called[0]].root
    # These change the layout of what was concatenated, not the data.
    while operand.op in ("bitcast", "reshape", "copy"):
        operand = module.operands(operand)[0]
    if operand.op == "concatenate":
        yield from (Piece(part.arrays[0], part.op_name, part, ()) for part in module.operands(operand))
