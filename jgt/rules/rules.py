"""Rules as data: which pattern, which spec, which line; and the answer to a question about them.

`Rules` mirrors the YAML. It has a `SignalRule` for each entry under `signals:`, and each of these has a `SpecRule` for
each line under `params:`, `tensors:` and so on. Everything is frozen and hashable: a traced program depends on its rules
as it does on shapes, so they can be part of a cache's key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from jgt.document import Node, nearest
from jgt.rules.axes import AxisNames
from jgt.rules.pattern import matches, matches_end, prefixes
from jgt.rules.signals import BackwardRule, ContextRule, ExpertsRule, OverlapRule, SaveRule, SignalRule
from jgt.rules.spec import SpecRule

Own = Literal["drop", "keep"]
ALL_AXES = "whole"
"""Stands for all axes in `reads`."""
_PARTS = ("overlap", "experts", "context")
"""The rules of a signal that name one axis."""


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How the large parameters of a program are split that these rules do not fit.

    params: the mesh axes that split parameters, each along a dim that suits it.
    optimizer: the mesh axes that split optimizer state and gradients alone.
    tensor: the mesh axes that split matmuls, along dims that the program shows.
    """

    params: AxisNames = ()
    optimizer: AxisNames = ()
    tensor: AxisNames = ()
    where: str = field(default="rules", compare=False)

    def problems(self) -> Iterator[tuple[str, str]]:
        """See `bind`."""
        if bool(self.params or self.tensor) == bool(self.optimizer):
            yield "params", "one of params and optimizer has the axes. Write {params: [fsdp]}, or {optimizer: [data]} for the state alone"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of what is split."""
        return (*(self.params or self.optimizer), *self.tensor)


Slot = tuple[str | int, ...]
"""The position of a rule in a `Rules`, for example ("signals", 2, "tensors", 0).

Two rules with the same content are equal, so a rule by itself does not say which line of the file decided.
"""

RuleType = TypeVar("RuleType", SpecRule, SaveRule, OverlapRule, ExpertsRule, ContextRule)
Candidate = tuple[Slot, RuleType]


@dataclass(frozen=True, kw_only=True)
class Match(Generic[RuleType]):
    """The answer to one question.

    rule: the rule that decides; None if no rule matches, or if the first one is wrong for this part of the program.
    decided: the slots of the rules that got a turn. shadowed: the slots of later rules that match too, each with the file:line
    of the rule that came before it. problems: messages about rules that match but do not fit.
    """

    rule: RuleType | None = None
    decided: tuple[Slot, ...] = ()
    shadowed: tuple[tuple[Slot, str], ...] = ()
    problems: tuple[str, ...] = ()


def first_match(candidates: Iterable[Candidate[RuleType]]) -> Match[RuleType]:
    """The answer of these rules, in their order: the first one decides."""
    found = list(candidates)
    if not found:
        return Match()
    (slot, rule), *later = found
    return Match(rule=rule, decided=(slot,), shadowed=tuple((other, rule.where) for other, _ in later))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one program, in order of precedence.

    inputs: the spec of each input, by its path.
    params: the spec of each parameter, by the end of its path. A tied parameter, which is used under several signals, needs such a rule.
    optimizer: the spec of each parameter's optimizer state and gradient, where it differs from the parameter's.
    signals: what happens at each signal, by a pattern such as `layers/*`.
    default: parameters without a rule are replicated. Without this key, they are an error.
    own: layouts that the program itself asks for are dropped, or kept beside the rules.
    reads: the axes over which a parameter that is split is gathered where an operation reads it; `whole`: all. Without it, XLA chooses.
    otherwise: what splits large parameters without rules, or where those of a shipped file do not fit the program.

    is_chosen says whether they were made by `otherwise`, for one program; is_batch_implied, whether nobody wrote `inputs`, and they follow
    the group `batch`. notes: what could not be chosen, and why.
    """

    FOLDER: ClassVar[str] = "rules"
    """The folder of the shipped rules files."""

    inputs: tuple[SpecRule, ...] = ()
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    signals: tuple[SignalRule, ...] = ()
    default: Annotated[Literal["replicate"], "Leave it out so that a parameter without a rule is an error"] | None = None
    own: Own = "drop"
    reads: AxisNames = ()
    otherwise: SplitRule | None = None
    is_chosen: bool = field(default=False, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    is_batch_implied: bool = field(default=False, compare=False)
    where: str = field(default="rules", compare=False)

    @property
    def is_shipped(self) -> bool:
        """Whether they come with jgt, for a mesh that may lack some of their axes."""
        return Node(None, self.where).is_shipped(self.FOLDER)

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec in the rules."""
        yield from (*self.params, *self.optimizer, *self.inputs)
        for rule in self.signals:
            yield from rule.spec_rules()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of the first dim of arrays with the batch's rows, outermost first."""
        # In order: rules name those that split parameters last.
        return tuple(dict.fromkeys(axis for rule in self.inputs for axes in rule.spec[:1] if axes is not ... for axis in axes))

    def axes_of_parameters(self) -> frozenset[str]:
        """The axes that a rule splits parameters, matmuls or experts over; axes of the optimizer state alone do not count."""
        specs = [*self.params, *(spec for rule in self.signals for spec in rule.params)]
        others = [part.axis for rule in self.signals for part in (rule.overlap, rule.experts) if part is not None]
        of_others = () if self.otherwise is None or self.otherwise.optimizer else self.otherwise.axes
        return frozenset(axis for spec in specs for axis in spec.axes).union(others, of_others)

    @property
    def contexts(self) -> tuple[ContextRule, ...]:
        """All rules about long sequences."""
        return tuple(rule.context for rule in self.signals if rule.context is not None)

    def for_rows(self, order: Literal["plain", "zigzag"]) -> Rules:
        """The rules of the same program for rows that arrive in this order."""

        def of(rule: ContextRule) -> ContextRule:
            own = None if rule.order == "zigzag_rows" else rule.order
            return replace(rule, order=own if order == "plain" else "zigzag_rows")

        return replace(self, signals=tuple(replace(one, context=one.context and of(one.context)) for one in self.signals))

    def match_input(self, path: str, rank: int, *other_paths: str, is_state: bool = False) -> Match[SpecRule]:
        """The rule of an argument that is not a parameter, by any of its paths. A spec with more dims than the argument does not match it.

        is_state: only patterns that name something match. A pattern of wildcards alone is meant for the batch, and state has no rows.
        """
        # No upper limit: one rule may serve inputs of several ranks, and their further dims stay whole.
        return first_match(
            (("inputs", index), rule)
            for index, rule in enumerate(self.inputs)
            if not (is_state and {*rule.pattern.split("/")} <= {"*", "**"})
            and rank >= rule.rank
            and any(matches_end(rule.pattern, one) for one in (path, *other_paths))
        )

    def where_of(self, signal: str) -> str:
        """The file:line of the first rule for a signal, or for the nearest signal around it that has one; empty if there is none."""
        for path in prefixes(signal):
            for rule in self.signals:
                if path and matches(rule.pattern, path):
                    return rule.where
        return ""

    def axis_problems(self, axes: Iterable[str]) -> Iterator[str]:
        """A problem for each axis that a mesh with these axes does not have, at the first rule that names it."""
        known = tuple(axes)
        missing: dict[str, list[str]] = {}
        for where, what, axis in self._axes_named():
            if axis not in known:
                missing.setdefault(axis, []).append(f"{where}: {what}")
        for axis, (place, *others) in missing.items():
            off = f"{nearest(axis, known)} To turn the axis off, give it the size 1 in mesh: {{{axis}: 1}}"
            remedy = "Write null for a dim that no axis splits" if axis in ("None", "none") else off
            more = f", which {len(others)} more {'rules name' if len(others) > 1 else 'rule names'}, too" if others else ""
            yield f"{place}: the mesh has no axis {axis!r}{more}. {remedy}"

    def on(self, axes: Iterable[str]) -> Rules:
        """These rules on a mesh with these axes: an axis of shipped rules that it lacks has size 1.

        Not if the mesh has an axis that the rules do not name: it may be a slip for one that they do.
        """
        known, named = {*axes}, {axis for _, _, axis in self._axes_named()}
        return _without(self, named - known) if self.is_shipped and known < named else self

    def tree(self) -> dict[str, object]:
        """The mapping that a file of these rules contains, without those of signals."""
        tables = {key: {rule.pattern: rule.tree() for rule in getattr(self, key)} for key in ("inputs", "params", "optimizer")}
        reads = ALL_AXES if ALL_AXES in self.reads else list(self.reads)
        return {key: value for key, value in {**tables, "reads": reads, "default": self.default}.items() if value}

    def _axes_named(self) -> Iterator[tuple[str, str, str]]:
        """The file:line of each rule that names an axis, what messages call it, and the axis."""
        for rule in self.spec_rules():
            yield from ((rule.where, rule.pattern, axis) for axis in dict.fromkeys(rule.axes))
        for rule in self.signals:
            parts = {key: getattr(rule, key) for key in _PARTS}
            yield from ((part.where, f"{rule.pattern}: {key}", part.axis) for key, part in parts.items() if part)
        if self.otherwise is not None:
            yield from ((self.otherwise.where, "otherwise", axis) for axis in self.otherwise.axes)
        yield from ((self.where, "reads", axis) for axis in self.reads if axis != ALL_AXES)


def _without(part: Any, axes: Collection[str]) -> Any:
    """A part of rules on a mesh on which these axes have size 1."""
    match part:
        case OverlapRule() | ExpertsRule() | ContextRule():
            return None if part.axis in axes else part
        case Rules() | SignalRule() | BackwardRule() | SpecRule() | SplitRule():
            return replace(part, **{one.name: _without(getattr(part, one.name), axes) for one in fields(part)})
        case tuple():
            return tuple(_without(one, axes) for one in cast("tuple[Any, ...]", part) if one not in axes)
        case _:
            return part
