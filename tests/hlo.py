"""What tests ask of a compiled program beyond jgt's own reader: what loops run, where it branches, what a value is made of."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from jgt.plan.groups import groups_of, spanned
from jgt.plan.hlo import KINDS, Instruction, Module, Spot

Element = tuple[Spot, tuple[int, ...]]
"""An instruction, and the path to an element of its tuple."""


def axes_of(collective: Instruction, mesh: Mapping[str, int]) -> frozenset[str]:
    """The axes of a mesh that a collective talks along."""
    return frozenset(spanned(groups_of(collective, prod(mesh.values())), mesh))


def looped(module: Module) -> frozenset[str]:
    """The computations that a loop runs, and all that those call."""
    return reached(module, [name for i in module.instructions() if i.op == "while" for name in i.called])


def reached(module: Module, computations: Iterable[str]) -> frozenset[str]:
    """These computations, and all that they call."""
    pending = list(computations)
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [c for i in module.computations[name].instructions.values() for c in i.called]
    return frozenset(found)


def collectives(module: Module, *, in_loops: bool) -> list[Instruction]:
    """Those that loops run, or the others."""
    inside = looped(module)
    within = inside if in_loops else frozenset(module.computations) - inside
    return [i for i in module.instructions(within=within) if i.kind in KINDS]


def conditionals(module: Module) -> Iterator[tuple[str, Instruction]]:
    """Each with the name of the computation that it stands in."""
    for name, computation in module.computations.items():
        yield from ((name, i) for i in computation.instructions.values() if i.op == "conditional")


def sources(module: Module, computation: str, name: str) -> set[str]:
    """The ops that a value is computed by: through calls, loops and tuples, element by element; "argument" for the program's own."""
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
    """What element `path` of a value comes from."""
    instruction, at = module.at(spot), spot.computation
    op, operands = instruction.op, instruction.operands
    if op == "parameter":
        yield from ((given, path) for given in _given(module, spot))
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


def _given(module: Module, parameter: Spot) -> Iterator[Spot]:
    """What callers give for a parameter."""
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
            # What reduce, scatter and the like call sees parts of any of their operands.
            yield from (Spot(outer, operand) for operand in caller.operands)


def _result(module: Module, computation: str) -> Spot:
    return Spot(computation, module.computations[computation].root)
