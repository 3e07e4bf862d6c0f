"""The constraints that rules put into a program, as a person reads them: the line that asks, the operation that is constrained, the layout.

The rewriter notes each constraint where it inserts it. In a pipeline these are the constraints of the whole program, which its parts get
where they run; what a pipeline itself moves is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from jax.sharding import NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.dims import sharding_dims, show_dims
from jgt.program.places import line_of
from jgt.program.uses import parameter_uses
from jgt.replacements.replacement import Inserted
from jgt.sharding.arguments import Arguments
from jgt.sharding.call import PlannedCall
from jgt.sharding.inputs import path_text

_COLUMNS = ("rule", "operation", "signal", "value", "shape", "spec")


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """A constraint on a value.

    rule: the file:line of the rule; `default` for an argument without one.
    operation: the file:line of the operation whose result it is; of a parameter, the line that uses it.
    signal: where that is.
    value: what it is: a parameter, an input, a named tensor, or a value that leaves a signal.
    shape: its sizes.
    spec: the axes of its dims as the YAML writes them; empty if the partitioner chooses them.
    backward: the same of its cotangent.
    """

    rule: str
    operation: str
    signal: str
    value: str
    shape: tuple[int, ...]
    spec: str
    backward: str


@dataclass(frozen=True, kw_only=True)
class Insertions:
    """All constraints of a call, those of its arguments first."""

    constraints: tuple[Insertion, ...]

    def __iter__(self) -> Iterator[Insertion]:
        return iter(self.constraints)

    def __len__(self) -> int:
        return len(self.constraints)

    def __str__(self) -> str:
        """A table with a line for each constraint. A cotangent with another spec than the value's is behind it."""
        rows = [_COLUMNS, *(_cells(one) for one in self.constraints)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self)} constraints"])


def insertions_of(arguments: Arguments, planned: PlannedCall) -> Insertions:
    """The constraints of a planned call."""
    reader = _Reader(arguments, planned)
    return Insertions(constraints=tuple(map(reader.read, planned.inserted)))


class _Reader:
    """Reads the notes of the rewriter about one call."""

    def __init__(self, arguments: Arguments, planned: PlannedCall):
        params = arguments.parameters
        uses = parameter_uses(planned.program, len(params))
        self._names = [*(f"parameter {path_text(path[2:])}" for path, _ in params), *(f"input {one.name}" for one in arguments.inputs)]
        self._uses = [(", ".join(use.signals), next(filter(None, use.sources), "")) for use in uses]
        self._rules = ["" if match.rule is None else match.rule.where for match in planned.answers]
        self._numbers = {var: number for number, var in enumerate(jx.body(planned.program).invars)}

    def read(self, noted: Inserted) -> Insertion:
        """The constraint of a note."""
        rule, value, signal, operation, var, forward, backward = noted
        if isinstance(operation, int):
            rule, value = self._rules[operation], self._names[operation]
            signal, line = self._uses[operation] if operation < len(self._uses) else ("", "")
        else:
            line = line_of(operation)
            # A cast has the layout of the argument, and so the rule.
            source = operation.invars[0] if not rule and operation.invars else None
            rule = rule or (self._rules[self._numbers[source]] if source in self._numbers else "")
        shape = jx.shape_of(var)
        return Insertion(
            rule=rule or "default",
            operation=line,
            signal=signal,
            value=value.partition(" at ")[0],
            shape=shape,
            spec=_spec(forward, len(shape)),
            backward=_spec(backward, len(shape)),
        )


def _spec(sharding: NamedSharding | None, rank: int) -> str:
    return "" if sharding is None else show_dims(sharding_dims(sharding, rank))


def _cells(one: Insertion) -> tuple[str, ...]:
    rule, operation, signal, value, shape, spec, backward = astuple(one)
    both = spec if spec == backward else f"{spec or '(free)'} backward {backward}"
    return rule, operation, signal, value, "x".join(map(str, shape)), both
