"""Queries on a compiled program: what its loops run, where it branches, and from which ops a value is computed."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from jgt.planner.hlo.groups import axes_between, groups_of
from jgt.planner.hlo.instruction import COLLECTIVES, Instruction
from jgt.planner.hlo.text import Module, Spot

Element = tuple[Spot, tuple[int, ...]]
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


def conditionals(module: Module) -> Iterator[tuple[str, Instruction]]:
    """The conditionals, each with the name of its computation."""
    for name, computation in module.computations.items():
        yield from ((name, i) for i in computation.instructions.values() if i.op == "conditional")


def sources(module: Module, computation: str, name: str) -> set[str]:
    """The ops from which a value is computed, through calls, loops and tuple elements. "argument" stands for the program's arguments."""
    found: set[str] = set()
    seen: set[Element] = set()
    pending: list[Element] = [(Spot(computation, name), ())]
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            spot, _ = item
            op = module.at(spot).op
            found.add("argument" if op == "parameter" and spot.computation == module.entry else op)
            pending += _before(module, *item)
    return found


def _before(module: Module, spot: Spot, path: tuple[int, ...]) -> Iterator[Element]:
    """The values that element `path` of a value is directly computed from."""
    instruction, at = module.at(spot), spot.computation
    op, operands = instruction.op, instruction.operands
    if op == "parameter":
        yield from ((argument, path) for argument in _arguments(module, spot))
    elif op == "get-tuple-element":
        yield Spot(at, operands[0]), (int(instruction.attribute("index")), *path)
    elif op == "tuple" and path:
        yield Spot(at, operands[path[0]]), path[1:]
    elif op == "while":
        yield Spot(at, operands[0]), path
        yield _result(module, instruction.attribute("body")), path
    elif op in ("fusion", "call", "conditional"):
        if op == "conditional":
            yield Spot(at, operands[0]), ()
        yield from ((_result(module, called), path) for called in instruction.called)
    else:
        yield from ((Spot(at, operand), ()) for operand in operands)


def _arguments(module: Module, parameter: Spot) -> Iterator[Spot]:
    """The arguments that callers pass for a parameter."""
    at, name = parameter
    number = next(n for n, p in module.computations[at].parameters.items() if p == name)
    for outer, caller in module.callers.get(at, ()):
        if caller.op == "while":
            yield Spot(outer, caller.operands[0])
            yield _result(module, caller.attribute("body"))
        elif caller.op == "conditional":
            yield from (Spot(outer, o) for o, c in zip(caller.operands[1:], caller.called, strict=True) if c == at)
        elif caller.op in ("fusion", "call"):
            yield Spot(outer, caller.operands[number])
        else:
            # A computation called by reduce, scatter and the like is applied to parts of any of their operands.
            yield from (Spot(outer, operand) for operand in caller.operands)


def _result(module: Module, computation: str) -> Spot:
    return Spot(computation, module.computations[computation].root)
