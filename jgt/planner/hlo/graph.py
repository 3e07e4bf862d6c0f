"""The calls between computations, and the flow of values through them.

XLA's text is flat. A collective in the body of a loop appears in it once although it runs in every iteration, and a value that enters the
body is only `parameter(0)` there. An instruction runs as often as its computation, and a computation as often as all its callers together.
The product along nested loops follows from the recursion.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.shares import branch_share
from jgt.planner.hlo.text import Module
from jgt.planner.hlo.trips import trip_count

_OPAQUE = ("while", "fusion", "call", "conditional", "custom-call")
"""Ops whose results do not correspond to their operands one by one."""


def runs_per_step(module: Module, further_rounds: int = 0) -> dict[str, Fraction]:
    """The number of runs of each computation in one run of the program.

    A loop of unknown length counts as one iteration, and a branch without a known fraction as always taken. further_rounds: see
    `expected_trips`.
    """
    runs: dict[str, Fraction] = {module.entry: Fraction(1)}

    def of(name: str) -> Fraction:
        if name not in runs:
            # XLA has no recursion, but a malformed text might: 0 ends it.
            runs[name] = Fraction(0)
            runs[name] = sum(
                (of(i.computation) * runs_per_call(module, i, name, further_rounds) for i in module.callers.get(name, ())), Fraction(0)
            )
        return runs[name]

    # Computations that nothing calls get 0.
    for name in module.computations:
        of(name)
    return runs


def branch_shares(module: Module, conditional: Instruction) -> list[Fraction] | None:
    """The share of a conditional's visits that each of its branches is taken in; None if no branch says.

    XLA does not know it. A pipeline does, from its schedule, and writes it as a named scope around what is in the branch. Branches that
    say nothing share what the others leave.
    """
    operations = [module.computations[name].instructions.values() for name in conditional.called]
    said = [branch_share(conditional.op_name, (i.op_name for i in inside)) for inside in operations]
    if all(share is None for share in said):
        return None
    left = max(1 - sum((share for share in said if share is not None), Fraction(0)), Fraction(0))
    return [left / said.count(None) if share is None else share for share in said]


def runs_per_call(module: Module, caller: Instruction, called: str, further_rounds: int = 0) -> Fraction:
    """The number of runs of a computation in one run of an instruction that calls it."""
    if caller.op == "while":
        trips = trip_count(module, caller, further_rounds)
        # The condition is evaluated once more than the body: the last time it ends the loop.
        return Fraction((1 if trips is None else trips) + (caller.attribute("condition") == called))
    if caller.op == "conditional":
        shares = branch_shares(module, caller) or [Fraction(1)] * len(caller.called)
        # One computation may be both branches.
        return sum((share for name, share in zip(caller.called, shares, strict=True) if name == called), Fraction(0))
    return Fraction(1)


def producers(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that a value is directly computed from. For a parameter, these are the arguments that its callers pass."""
    if instruction.op == "get-tuple-element":
        # Its operand is the whole tuple, but only one of the tuple's operands matters for this element.
        yield from _elements(module, module.operands(instruction)[0], int(instruction.attribute("index")))
        return
    if instruction.op != "parameter":
        yield from module.operands(instruction)
        return
    for caller in module.callers.get(instruction.computation, ()):
        arguments, number = module.operands(caller), instruction.parameter_number
        if caller.op == "conditional":
            # Operand 0 chooses the branch; one operand for each branch follows.
            yield arguments[1 + caller.called.index(instruction.computation)]
        elif number < len(arguments):
            yield arguments[number]


def _elements(module: Module, whole: Instruction, index: int) -> Iterator[Instruction]:
    """The instructions that an element of a tuple comes from: one operand where results match operands, otherwise the whole tuple.

    An element of a loop's tuple comes from the iteration before and, in the first one, from outside.
    """
    callers = module.callers.get(whole.computation, ()) if whole.op == "parameter" else ()
    loops = [whole] if whole.op == "while" else [caller for caller in callers if caller.op == "while"]
    for loop in loops:
        for state in (module.computations[loop.attribute("body")].root, module.operands(loop)[0]):
            # Only a tuple has an operand for each element.
            yield module.operands(state)[index] if state.op == "tuple" else state
    if not loops:
        yield _tuple_element(module, whole, index)


def _tuple_element(module: Module, result: Instruction, index: int) -> Instruction:
    whole = module.operands(result)[0] if result.op.endswith("-done") else result
    # A combined collective, all-reduce(%a, %b), returns a tuple with a result for each operand.
    is_elementwise = whole.op == "tuple" or len(whole.operands) == len(result.arrays) > 1
    return module.operands(whole)[index] if is_elementwise and whole.op not in _OPAQUE else whole


def consumers(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that use a value directly. The result of a computation is used by what called it.

    An element of a tuple is used by what takes this element, in a loop in the next iteration and after the last one.
    """
    for user in module.users(instruction):
        if user.op == "tuple":
            for index in (n for n, operand in enumerate(user.operands) if operand == instruction.name):
                yield from _users_of_element(module, user, index, set())
        else:
            yield user
    if instruction.is_root:
        yield from module.callers.get(instruction.computation, ())


def _users_of_element(module: Module, whole: Instruction, index: int, seen: set[Instruction]) -> Iterator[Instruction]:
    """The instructions that use an element of a tuple. seen: tuples that it has been an element of."""
    if whole in seen:
        return
    seen.add(whole)
    for user in module.users(whole):
        if user.op == "while":
            yield from _users_in_loop(module, user, index, seen)
        elif user.op != "get-tuple-element" or user.attribute("index") == str(index):
            yield user
    for caller in module.callers.get(whole.computation, ()) if whole.is_root else ():
        if caller.op == "while":
            yield from _users_in_loop(module, caller, index, seen)
        yield from _users_of_element(module, caller, index, seen)


def _users_in_loop(module: Module, loop: Instruction, index: int, seen: set[Instruction]) -> Iterator[Instruction]:
    yield from _users_of_element(module, module.computations[loop.attribute("body")].parameters[0], index, seen)
