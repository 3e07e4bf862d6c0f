"""Queries on a compiled program: what its loops run, where it branches, and from which ops a value is computed."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from jgt.planner.hlo.groups import axes_between, groups_of
from jgt.planner.hlo.instruction import COLLECTIVES, Instruction
from jgt.planner.hlo.text import Module

Element = tuple[Instruction, tuple[int, ...]]
"""An instruction, and the path to an element of its tuple."""


def axes_of(collective: Instruction, mesh: Mapping[str, int]) -> frozenset[str]:
    """The mesh axes that a collective communicates over."""
    return frozenset(axes_between(groups_of(collective, prod(mesh.values())), mesh))


def sizes_of(instruction: Instruction) -> list[int]:
    """The number of elements of each array in the result."""
    return [array.size for array in instruction.arrays]


def looped(module: Module) -> frozenset[str]:
    """The computations that loops run, directly or through calls."""
    return reached(module, [name for i in module.instructions() if i.op == "while" for name in i.called])


def reached(module: Module, computations: Iterable[str]) -> frozenset[str]:
    """These computations and all that they call, directly or not."""
    pending = list(computations)
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [c for i in module.computations[name].instructions.values() for c in i.called]
    return frozenset(found)


def collectives(module: Module, *, in_loops: bool) -> list[Instruction]:
    """The collectives inside loops, or those outside."""
    inside = looped(module)
    within = inside if in_loops else frozenset(module.computations) - inside
    return [i for i in module.instructions(within=within) if i.kind in COLLECTIVES]


def conditionals(module: Module) -> Iterator[Instruction]:
    """The conditionals."""
    return (i for i in module.instructions() if i.op == "conditional")


def sources(module: Module, instruction: Instruction) -> set[str]:
    """The ops from which a value is computed, through calls, loops and tuple elements. "argument" stands for the program's arguments."""
    found: set[str] = set()
    seen: set[Element] = set()
    pending: list[Element] = [(instruction, ())]
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            source, _ = item
            found.add("argument" if source.op == "parameter" and source.computation == module.entry else source.op)
            pending += _before(module, *item)
    return found


def _before(module: Module, instruction: Instruction, path: tuple[int, ...]) -> Iterator[Element]:
    """The values that element `path` of a value is directly computed from."""
    op, operands = instruction.op, module.operands(instruction)
    if op == "parameter":
        yield from ((argument, path) for argument in _arguments(module, instruction))
    elif op == "get-tuple-element":
        yield operands[0], (int(instruction.attribute("index")), *path)
    elif op == "tuple" and path:
        yield operands[path[0]], path[1:]
    elif op == "while":
        yield operands[0], path
        yield module.computations[instruction.attribute("body")].root, path
    elif op in ("fusion", "call", "conditional"):
        if op == "conditional":
            yield operands[0], ()
        yield from ((module.computations[called].root, path) for called in instruction.called)
    else:
        yield from ((operand, ()) for operand in operands)


def _arguments(module: Module, parameter: Instruction) -> Iterator[Instruction]:
    """The arguments that callers pass for a parameter."""
    at = parameter.computation
    for caller in module.callers.get(at, ()):
        operands = module.operands(caller)
        if caller.op == "while":
            yield operands[0]
            yield module.computations[caller.attribute("body")].root
        elif caller.op == "conditional":
            yield from (operand for operand, called in zip(operands[1:], caller.called, strict=True) if called == at)
        elif caller.op in ("fusion", "call"):
            yield operands[parameter.parameter_number]
        else:
            # A computation called by reduce, scatter and the like is applied to parts of any of their operands.
            yield from operands
