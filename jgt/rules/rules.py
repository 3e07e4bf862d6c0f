"""Rules as data: which pattern, which spec, which line; and the answer to a question about them.

`Rules` mirrors the YAML. It has a `SignalRule` for each entry under `signals:`, and each of these has a `SpecRule` for
each line under `params:`, `tensors:` and so on. Everything is frozen and hashable: a traced program depends on its rules
as it does on shapes, so they can be part of a cache's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Literal, TypeVar

from jgt.document import nearest
from jgt.rules.pattern import matches, matches_end, prefixes
from jgt.rules.spec import SpecRule

Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, kw_only=True)
class SaveRule:
    """The fate of a named tensor until the backward pass: it is kept on the device, recomputed, or offloaded to the host."""

    name: str
    action: Action
    # Rules are equal wherever they were written, so a cache whose key contains them finds them again.
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """The mesh axis whose sends the matmuls of a signal hide."""

    axis: str
    where: str = field(default="rules", compare=False)


Overflow = Literal["rounds", "drop"]


@dataclass(frozen=True, kw_only=True)
class ExpertsRule:
    """The mesh axis that holds the experts of a signal, and how rows travel to them: by an all-to-all of arrays with a fixed capacity.

    room: the capacity factor, which is the rows that each pair of devices has room for, over their number if all experts are chosen equally
    often. over: what becomes of further rows.
    """

    axis: str
    room: float = 1.25
    over: Overflow = "rounds"
    where: str = field(default="rules", compare=False)


Method = Literal["gather", "ring", "ulysses"]
Order = Literal["plain", "zigzag", "zigzag_rows"]


@dataclass(frozen=True, kw_only=True)
class ContextRule:
    """The mesh axis that splits the sequence of a signal's attention, and how queries and keys meet.

    order: the order in which devices compute; None: zigzag for a causal ring, else plain; zigzag_rows: the rows have it already.
    between: the names of the tensors q, k, v and of the result.
    """

    axis: str
    method: Method
    order: Order | None = None
    between: tuple[str, str, str, str] = ("q", "k", "v", "heads")
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class SignalRule:
    """The rules of the signals that `pattern` matches.

    params, optimizer: specs of parameters that are used below the signal, and of their optimizer state. tensors, save: specs of
    tensors that are named below it, and whether they are kept. out: the spec of floating values that are computed inside
    the signal and used outside. backward_out, backward_tensors: specs of the cotangents, where they differ. overlap: what the matmuls below
    the signal hide. experts: where the experts are that are called below it. context: how the attention below it is split along the
    sequence.
    """

    pattern: str
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    tensors: tuple[SpecRule, ...] = ()
    out: SpecRule | None = None
    backward_out: SpecRule | None = None
    backward_tensors: tuple[SpecRule, ...] = ()
    save: tuple[SaveRule, ...] = ()
    overlap: OverlapRule | None = None
    experts: ExpertsRule | None = None
    context: ContextRule | None = None
    where: str = field(default="rules", compare=False)

    def covers(self, signal: str) -> bool:
        """Whether the pattern matches this signal or one around it."""
        return any(matches(self.pattern, prefix) for prefix in prefixes(signal))

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec of this rule."""
        yield from (*self.params, *self.optimizer, *self.tensors, *self.backward_tensors)
        yield from (rule for rule in (self.out, self.backward_out) if rule is not None)


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

    params, optimizer: specs of parameters under any signal; a tied parameter, which is used under several, needs such a rule.
    inputs: specs of the arguments that are not parameters. default: what a parameter without a rule gets; None makes it an error.
    """

    FOLDER: ClassVar[str] = "rules"
    """The folder of the shipped rules files."""

    signals: tuple[SignalRule, ...] = ()
    params: tuple[SpecRule, ...] = ()
    optimizer: tuple[SpecRule, ...] = ()
    inputs: tuple[SpecRule, ...] = ()
    default: Literal["replicate"] | None = None
    where: str = field(default="rules", compare=False)

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
        return frozenset(axis for spec in specs for axis in spec.axes).union(others)

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
        named = [(rule.where, rule.pattern, axis) for rule in self.spec_rules() for axis in dict.fromkeys(rule.axes)]
        for rule in self.signals:
            parts = {"overlap": rule.overlap, "experts": rule.experts, "context": rule.context}
            named += [(part.where, f"{rule.pattern}: {key}", part.axis) for key, part in parts.items() if part]
        missing: dict[str, list[str]] = {}
        for where, what, axis in named:
            if axis not in known:
                missing.setdefault(axis, []).append(f"{where}: {what}")
        for axis, (place, *others) in missing.items():
            off = f"{nearest(axis, known)} To turn the axis off, give it the size 1 in mesh: {{{axis}: 1}}"
            remedy = "Write null for a dim that no axis splits" if axis in ("None", "none") else off
            more = f", which {len(others)} more {'rules name' if len(others) > 1 else 'rule names'}, too" if others else ""
            yield f"{place}: the mesh has no axis {axis!r}{more}. {remedy}"
