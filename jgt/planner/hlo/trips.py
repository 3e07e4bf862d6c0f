"""The number of trips of a loop.

XLA writes the count of loops that start, step and end at constants, such as `jax.lax.scan`, into the loop's `backend_config`. Some passes
of XLA, which peel an iteration off a loop or put two into one body, drop it again. Then the count is read from the limit in the condition
(`iv < 31`), the step in the body (`iv + 1`) and the start outside. Each of the three is a constant, or a sum of constants and of the
counter, behind copies and fusions.

Some loops have no such count, because it follows from what is computed. Then the loop's name may say which number to expect
(`jgt.planner.hlo.shares.expected_trips`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jgt.planner.hlo.instruction import Instruction
from jgt.planner.hlo.shares import expected_trips
from jgt.planner.hlo.text import Module

_COUNTER = re.compile(r'"known_induction_variable":\{"tuple_index":"(\d+)"')
_SAME = ("copy", "bitcast", "convert", "reshape")


class _Sum(NamedTuple):
    """constant + times · counter."""

    constant: int
    times: int = 0


def trip_count(module: Module, loop: Instruction, further_rounds: int = 0) -> int | None:
    """The trips of a loop, or the trips to expect of it; None if they are unknown. further_rounds: see `expected_trips`."""
    expected = expected_trips(loop.op_name, further_rounds)
    if expected is not None:
        return expected
    if loop.trip_count is not None:
        return loop.trip_count
    found = _COUNTER.search(loop.text)
    index = int(found[1]) if found else 0
    limit = _limit(module, loop.attribute("condition"), index)
    step = _element(module, module.computations[loop.attribute("body")].root, index)
    start = _element(module, module.operands(loop)[0], index)
    if limit is None or step is None or start is None or start.times or step.times != 1 or step.constant <= 0:
        return None
    return max(-(-(limit - start.constant) // step.constant), 0)


def unknown_loops(module: Module) -> Iterator[Instruction]:
    """The loops whose trip count is unknown."""
    return (i for i in module.instructions() if i.op == "while" and trip_count(module, i) is None)


def _limit(module: Module, condition: str, index: int) -> int | None:
    """The first value of the counter for which a condition `counter + a < b` fails."""
    root = module.computations[condition].root
    arguments: Sequence[_Sum | None] = ()
    if root.op == "fusion":
        arguments = [_value(module, operand, index) for operand in module.operands(root)]
        root = module.computations[root.called[0]].root
    if root.op != "compare" or root.attribute("direction") != "LT":
        return None
    less, more = (_value(module, operand, index, arguments) for operand in module.operands(root))
    if less is None or more is None or less.times != 1 or more.times:
        return None
    return more.constant - less.constant


def _element(module: Module, whole: Instruction, index: int) -> _Sum | None:
    if whole.op != "tuple" or index >= len(whole.operands):
        return None
    return _value(module, module.operands(whole)[index], index)


def _value(module: Module, instruction: Instruction, index: int, arguments: Sequence[_Sum | None] = ()) -> _Sum | None:
    """A value in terms of the counter, element `index` of the loop's tuple. arguments: the operands of the fusion that
    contains the value.
    """
    if instruction.op == "constant":
        literal = instruction.text.partition(")")[0]
        return _Sum(int(literal)) if re.fullmatch(r"-?\d+", literal) else None
    if instruction.op == "parameter":
        return arguments[instruction.parameter_number] if instruction.parameter_number < len(arguments) else None
    if instruction.op == "get-tuple-element":
        whole, element = module.operands(instruction)[0], int(instruction.attribute("index"))
        if whole.op == "parameter":
            return _Sum(0, 1) if element == index else None
        return _element(module, whole, element)
    operands = [_value(module, operand, index, arguments) for operand in module.operands(instruction)]
    if instruction.op == "fusion":
        return _value(module, module.computations[instruction.called[0]].root, index, operands)
    if instruction.op in _SAME:
        return operands[0]
    if instruction.op == "add" and (known := [x for x in operands if x is not None]) == operands:
        return _Sum(sum(x.constant for x in known), sum(x.times for x in known))
    return None
