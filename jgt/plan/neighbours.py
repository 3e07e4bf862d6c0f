"""What stands next to an instruction: XLA drops the names of some that it makes, but not those of their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jgt.plan.hlo import Computation, Instruction, Module, Spot
from jgt.plan.origin import NONE, Origin, Phase, origin_of, phase_of

_HOPS = 6


class Found(NamedTuple):
    """An origin, and the instruction that told it."""

    origin: Origin
    spot: Spot


def belongs(module: Module, spot: Spot) -> tuple[str, Phase]:
    """The signal and the phase of an instruction, by its own name or its neighbours'."""
    name = module.at(spot).op_name
    origin, _ = told(module, name, [spot], [spot])
    return (NONE, phase_of(name)) if origin is None else (origin.signal, origin.phase)


def told(module: Module, op_name: str, made_of: Iterable[Spot], made_into: Iterable[Spot]) -> tuple[Origin | None, Spot | None]:
    """The origin of an op name, or else of the nearest neighbour, and the neighbour of that origin, if there is one."""
    made_of, made_into = list(made_of), list(made_into)
    origin = origin_of(op_name)
    found = nearest(module, made_of, made_into, lambda other: origin is None or other.signal == origin.signal)
    if origin is None:
        if found is None:
            return None, None
        origin = found.origin
    # A loop that slices stacked weights, or stacks results, stands outside of the regions that they belong to.
    inner = origin.signal + "/"
    deeper = nearest(module, made_of, made_into, lambda other: other.signal.startswith(inner))
    if deeper is not None:
        origin, found = Origin(signal=deeper.origin.signal, phase=origin.phase), deeper
    return origin, found.spot if found else None


def nearest(
    module: Module, made_of: Iterable[Spot], made_into: Iterable[Spot], accepts: Callable[[Origin], bool] = lambda origin: True
) -> Found | None:
    """The nearest origin among instructions and what they are made of, or else what is made of others; within a few hops."""
    return _search(module, made_of, producers, accepts) or _search(module, made_into, consumers, accepts)


def _search(
    module: Module, ring: Iterable[Spot], step: Callable[[Module, Spot], Iterator[Spot]], accepts: Callable[[Origin], bool]
) -> Found | None:
    seen: set[Spot] = set()
    for _ in range(_HOPS + 1):
        ring = [s for s in dict.fromkeys(ring) if s not in seen]
        seen.update(ring)
        for near in ring:
            origin = origin_of(module.at(near).op_name)
            if origin is not None and accepts(origin):
                return Found(origin, near)
        ring = [further for near in ring for further in step(module, near)]
    return None


def producers(module: Module, spot: Spot) -> Iterator[Spot]:
    """What an instruction takes; a parameter takes what its callers give."""
    computation = module.computations[spot.computation]
    instruction = computation.instructions[spot.name]
    if instruction.op == "get-tuple-element":
        yield Spot(spot.computation, _element(computation, instruction))
        return
    if instruction.op != "parameter":
        yield from (Spot(spot.computation, name) for name in instruction.operands)
        return
    number = int(instruction.text.partition(")")[0])
    for at, caller in module.callers.get(spot.computation, ()):
        if caller.op == "conditional":
            branch = caller.called.index(spot.computation)
            yield Spot(at, caller.operands[1 + branch])
        elif number < len(caller.operands):
            yield Spot(at, caller.operands[number])


def _element(computation: Computation, element: Instruction) -> str:
    """What an element of a tuple is made of: of a tuple, or of a collective with an operand for each, that operand."""
    whole = computation.instructions[element.operands[0]]
    if whole.op.endswith("-done"):
        whole = computation.instructions[whole.operands[0]]
    index = int(element.attribute("index"))
    is_elementwise = whole.op == "tuple" or (len(whole.operands) > 1 and len(whole.operands) == len(computation.instructions[element.operands[0]].arrays))
    return whole.operands[index] if is_elementwise and whole.op not in ("while", "fusion", "call", "conditional", "custom-call") else whole.name


def consumers(module: Module, spot: Spot) -> Iterator[Spot]:
    """What takes an instruction; the result of a computation is taken where it was called."""
    computation = module.computations[spot.computation]
    yield from (Spot(spot.computation, name) for name in computation.users.get(spot.name, ()))
    if spot.name == computation.root:
        yield from (Spot(at, caller.name) for at, caller in module.callers.get(spot.computation, ()))
