"""Bytes on one device: what the arguments are, what the backward pass keeps of the forward pass, and XLA's own totals."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt.plan.chip import Target
from jgt.plan.compiled import Argument, Compiled
from jgt.plan.hlo import Computation, Instruction, Module, Spot
from jgt.plan.neighbours import told
from jgt.plan.origin import NONE, origin_of

_PASSES_ON = frozenset(["bitcast", "copy", "tuple", "get-tuple-element", "opt-barrier", "transpose", "reshape", "convert"])
USABLE = 0.95
"""The share of a GPU's memory that a program may have (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device. args: arguments, of which `groups` tells what they are; temp: all that XLA allocates besides.

    peak: XLA's own figure for a target, or all arguments, results and temp together where that is less or, on CPU, where it has none. gradients: as they are laid out; activations: what the backward pass needs of
    the forward pass, by signal, as far as it can be told; both are part of temp, though not all at once. host: kept in the host's
    memory instead. hbm: what the target has.
    """

    args_bytes: int
    temp_bytes: int
    peak_bytes: int
    output_bytes: int
    host_bytes: int
    hbm_bytes: int | None
    gradient_bytes: int
    groups: Mapping[str, int]
    activations: Mapping[str, int]

    @property
    def fits(self) -> bool | None:
        """Whether the peak leaves a twentieth of the target's memory free; None for a target without a figure."""
        return None if self.hbm_bytes is None else self.peak_bytes <= USABLE * self.hbm_bytes


def read_memory(compiled: Compiled, module: Module, groups: Mapping[str, Sequence[Argument]], gradient_bytes: int) -> Memory:
    """The memory of a compiled program; groups: its arguments by what they are."""
    stats, target = compiled.memory, compiled.target
    on_host = sum(a.local_bytes for a in compiled.arguments if a.is_on_host)
    # Where XLA compiles for a GPU that is not here, it counts arguments in the host's memory as the device's.
    counted_here = on_host if not stats.host_argument_size_in_bytes else 0
    args = stats.argument_size_in_bytes - counted_here
    together = args + max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0) + stats.temp_size_in_bytes
    return Memory(
        args_bytes=args,
        temp_bytes=stats.temp_size_in_bytes,
        # XLA's own peak has the arrays in the host's memory too.
        peak_bytes=together if target is None else min(together, stats.peak_memory_in_bytes - counted_here),
        output_bytes=stats.output_size_in_bytes,
        host_bytes=on_host + host_temp(stats),
        hbm_bytes=_hbm(target),
        gradient_bytes=gradient_bytes,
        groups={name: sum(a.local_bytes for a in found if not a.is_on_host) for name, found in groups.items()},
        activations=dict(sorted(_activations(module).items(), key=lambda item: -item[1])),
    )


def host_temp(stats: Any) -> int:
    """Bytes that a program keeps in the host's memory while it runs."""
    return getattr(stats, "host_temp_size_in_bytes", 0)


def _hbm(target: Target | None) -> int | None:
    return None if target is None else int(target.chip.hbm_gb * 1e9)


def _activations(module: Module) -> collections.Counter[str]:
    """Arrays that are made forward and taken backward, each once, where the step's main computation shows them."""
    found: collections.Counter[str] = collections.Counter()
    computation = module.computations[module.entry]
    for spot, num_bytes in _kept(module, computation, module.entry):
        origin, _ = told(module, module.at(spot).op_name, [spot], [])
        found[origin.signal if origin else NONE] += num_bytes
    return found


def _kept(module: Module, computation: Computation, at: str) -> Iterator[tuple[Spot, int]]:
    """What is kept: where it was made, and its bytes."""
    seen: set[tuple[str, int]] = set()
    for instruction in computation.instructions.values():
        if _phase(instruction) not in ("backward", "recompute"):
            continue
        for operand in instruction.operands:
            for maker, index in _makers(computation, operand):
                if (maker.name, index) not in seen and _phase(maker) == "forward" and maker.op not in ("parameter", "constant", "iota", "broadcast"):
                    seen.add((maker.name, index))
                    yield _written(module, at, maker, index), maker.arrays[index].num_bytes


def _phase(instruction: Instruction) -> str:
    origin = origin_of(instruction.op_name)
    return "" if origin is None or origin.signal == "optimizer" else origin.phase


def _makers(computation: Computation, name: str, index: int = 0) -> Iterator[tuple[Instruction, int]]:
    """The instructions that a value was made by, through what only passes it on; index: which array of a tuple."""
    instruction = computation.instructions[name]
    if instruction.op == "get-tuple-element":
        yield from _makers(computation, instruction.operands[0], int(instruction.attribute("index")))
    elif instruction.op == "tuple":
        if len(instruction.arrays) == len(instruction.operands) and index == 0:
            for operand in instruction.operands:
                yield from _makers(computation, operand)
    elif instruction.op in _PASSES_ON and len(instruction.operands) == 1:
        yield from _makers(computation, instruction.operands[0])
    elif index < len(instruction.arrays):
        yield instruction, index


def _written(module: Module, at: str, maker: Instruction, index: int) -> Spot:
    """Where an array is written: for a loop's result, the instruction in its body that makes it."""
    if maker.op != "while":
        return Spot(at, maker.name)
    name = maker.attribute("body")
    body = module.computations[name]
    root = body.instructions[body.root]
    if root.op == "tuple" and index < len(root.operands):
        return Spot(name, root.operands[index])
    return Spot(at, maker.name)
