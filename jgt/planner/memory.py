"""The memory of one device: arguments, what the backward pass keeps of the forward pass, and XLA's totals.

XLA reports totals: arguments, outputs, temporaries and a peak. Rules can change two parts, which are read here. The arguments are grouped
into parameters, optimizer state and inputs. An activation is an array that a forward instruction of the main computation makes and a
backward instruction reads. It belongs to the signal that made it, or, if a loop made it, to the signal inside the loop's body.

Invariant: activations and gradients are parts of the temporaries, but XLA reuses buffers, so their sum may exceed the total.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jgt.planner.compiled import Argument, Compiled
from jgt.planner.hardware.target import USABLE, used_bytes
from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.origin import NONE, find_origin, origin_of
from jgt.planner.hlo.text import Computation, Module
from jgt.planner.layouts import OPTIMIZER, Parameter

_FORWARDS = frozenset(["bitcast", "copy", "tuple", "get-tuple-element", "opt-barrier", "transpose", "reshape", "convert"])
"""Ops whose result is their operand in another form: the backward pass keeps one of the two."""
_NOT_KEPT = ("parameter", "constant", "iota", "broadcast")
"""Ops whose results are arguments, or made again where they are needed."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    args_bytes: arguments, by kind in `groups`. temp_bytes: everything that XLA allocates besides arguments and outputs; gradient_bytes
    and activations (by signal) are parts of it. peak_bytes: for a target, XLA's own figure, or the sum of arguments, outputs and
    temporaries if that is smaller; on CPU, where XLA has no figure, the sum. host_bytes: in the host's memory instead of the
    device's. hbm_bytes: the target's memory.
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
        """Whether the peak leaves 5 % of the target's memory free; None without a target."""
        return None if self.hbm_bytes is None else self.peak_bytes <= USABLE * self.hbm_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes of the target's usable memory that the step leaves, below 0 if it does not fit; 0 without a target."""
        return 0 if self.hbm_bytes is None else int(USABLE * self.hbm_bytes) - self.peak_bytes


def read_memory(compiled: Compiled, module: Module, params: Sequence[Parameter], *, has_gradients: bool) -> Memory:
    """The memory of a compiled program, whose text is `module`."""
    stats, target = compiled.memory, compiled.target
    on_host = sum(a.local_bytes for a in compiled.arguments if a.is_on_host)
    # XLA counts arguments in the host's memory among the device's, in its peak too, if a GPU is only described.
    miscounted = on_host if not stats.host_argument_size_in_bytes else 0
    args = stats.argument_size_in_bytes - miscounted
    total = used_bytes(stats) - miscounted
    return Memory(
        args_bytes=args,
        temp_bytes=stats.temp_size_in_bytes,
        peak_bytes=min(total, stats.peak_memory_in_bytes - miscounted) if compiled.is_described else total,
        output_bytes=stats.output_size_in_bytes,
        host_bytes=on_host + stats.host_temp_size_in_bytes,
        hbm_bytes=None if target is None else int(target.chip.hbm_gb * 1e9),
        gradient_bytes=sum(p.gradient_bytes for p in params) if has_gradients else 0,
        groups=_groups(compiled.arguments, {p.path for p in params}),
        activations=dict(sorted(_activations(module).items(), key=lambda item: -item[1])),
    )


def _groups(arguments: Sequence[Argument], parameters: Collection[str]) -> dict[str, int]:
    """The bytes of the arguments in the device's memory by kind; kinds without any arguments are left out."""
    groups: dict[str, list[int]] = {"parameters": [], "optimizer state": [], "inputs": []}
    for a in arguments:
        kind = "inputs" if a.position != 0 else "parameters" if a.path in parameters else "optimizer state"
        groups[kind].append(0 if a.is_on_host else a.local_bytes)
    return {name: sum(sizes) for name, sizes in groups.items() if sizes}


def _activations(module: Module) -> collections.Counter[str]:
    """Bytes by signal of the arrays that the forward pass makes and the backward pass reads, each counted once."""
    sizes: collections.Counter[str] = collections.Counter()
    # Layers are loops, so what is kept between forward and backward pass is a result of one loop and an operand of another.
    computation = module.computations[module.entry]
    for maker, index in dict.fromkeys(_forward_to_backward(computation)):
        written = _written_at(module, maker, index)
        origin, _ = find_origin(module, written.op_name, [written], [])
        sizes[origin.signal if origin else NONE] += maker.arrays[index].num_bytes
    return sizes


def _forward_to_backward(computation: Computation) -> Iterator[tuple[Instruction, int]]:
    """The forward instruction behind each operand of a backward one, and the index of the array in its result."""
    for instruction in computation.instructions.values():
        if _phase(instruction) in ("backward", "recompute"):
            for operand in instruction.operands:
                for maker, index in _makers(computation, operand):
                    if _phase(maker) == "forward" and maker.op not in _NOT_KEPT:
                        yield maker, index


def _phase(instruction: Instruction) -> str:
    origin = origin_of(instruction.op_name)
    # The update runs after the backward pass: what it reads is state or gradients, not activations.
    return "" if origin is None or origin.signal == OPTIMIZER else origin.phase


def _makers(computation: Computation, name: str, index: int = 0) -> Iterator[tuple[Instruction, int]]:
    """The instructions that made a value, and the index of the array in their results. index: the index of the array in
    the value's tuple.
    """
    instruction = computation.instructions[name]
    if instruction.op == "get-tuple-element":
        yield from _makers(computation, instruction.operands[0], int(instruction.attribute("index")))
    elif instruction.op == "tuple":
        # Arrays are counted with nested tuples flattened, so an index finds its operand only in a flat tuple.
        if len(instruction.arrays) == len(instruction.operands) and index == 0:
            for operand in instruction.operands:
                yield from _makers(computation, operand)
    elif instruction.op in _FORWARDS and len(instruction.operands) == 1:
        yield from _makers(computation, instruction.operands[0])
    elif index < len(instruction.arrays):
        yield instruction, index


def _written_at(module: Module, maker: Instruction, index: int) -> Instruction:
    """Where an array is written: for a loop's result, the instruction in its body that makes it."""
    if maker.op != "while":
        return maker
    root = module.computations[maker.attribute("body")].root
    # The loop's state is a tuple, and its root makes the next one.
    return module.operands(root)[index] if root.op == "tuple" and index < len(root.operands) else maker
