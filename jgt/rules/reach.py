"""Which rule decides, and which rules never decide anything: a rule that matches nothing is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from jgt.document import nearest
from jgt.rules.match import matches, matches_end, prefixes
from jgt.rules.rules import Rules, SaveRule, SignalRule
from jgt.rules.spec import SpecRule, fits_rank, min_rank

Rule = SpecRule | SaveRule
R = TypeVar("R", SpecRule, SaveRule)


class Matcher:
    """Asks rules about the parts of one program and remembers which of them answered."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.problems: list[str] = []
        self._decided: set[int] = set()
        self._shadowed: dict[int, Rule] = {}
        self._signals: dict[str, None] = {}
        self._tensors: dict[str, set[str]] = {}
        self._out_ranks: dict[str, set[int]] = {}

    @property
    def tensors(self) -> list[str]:
        """The names of tensors that were asked about."""
        return list(self._tensors)

    def see(self, signal: str) -> None:
        """Notes a signal of the program, with those around it."""
        for prefix in prefixes(signal):
            self._signals.setdefault(prefix)

    def param(self, path: str, signals: Sequence[str], rank: int) -> SpecRule | None:
        """The rule of a parameter of which these signals use `rank` dims; None when no rule matches."""
        return self._param("params", path, signals, lambda rules: self._fitting(rules, rank, f"the parameter {path}"))

    def optimizer(self, path: str, signals: Sequence[str], fits: Callable[[SpecRule], bool]) -> SpecRule | None:
        """The rule of a parameter's optimizer state, where it differs from the parameter's own; a spec that does not fit is passed over."""
        return self._param("optimizer", path, signals, lambda rules: self._first(filter(fits, rules)))

    def input(self, path: str, rank: int) -> SpecRule | None:
        """The rule of an argument that is not a parameter; shorter tensors than the spec are left alone."""
        return self._first(r for r in self.rules.inputs if matches_end(r.pattern, path) and rank >= min_rank(r.spec))

    def tensor(self, name: str, signal: str, rank: int, *, backward: bool = False) -> SpecRule | None:
        """The rule of a tensor that is named below this signal."""
        self._tensors.setdefault(name, set()).add(signal)
        rules = (
            rule
            for s in self.rules.signals
            if s.covers(signal)
            for rule in (s.backward_tensors if backward else s.tensors)
            if matches(rule.pattern, name)
        )
        return self._fitting(rules, rank, f"the tensor {name!r} at the signal {signal!r}")

    def out(self, signal: str, rank: int, *, backward: bool = False) -> SpecRule | None:
        """The rule of a floating value of this rank that leaves exactly this signal."""
        self._out_ranks.setdefault(signal, set()).add(rank)
        rules = (
            rule
            for s in self.rules.signals
            if matches(s.pattern, signal) and (rule := s.backward_out if backward else s.out) is not None
        )
        return self._first(rule for rule in rules if fits_rank(rule.spec, rank))

    def save(self, name: str, signal: str) -> SaveRule | None:
        """What the backward pass finds of a tensor named below this signal."""
        return self._first(r for s in self.rules.signals if s.covers(signal) for r in s.save if matches(r.name, name))

    def _param(
        self, section: str, path: str, signals: Sequence[str], choose: Callable[[Iterable[SpecRule]], SpecRule | None]
    ) -> SpecRule | None:
        own: tuple[SpecRule, ...] = getattr(self.rules, section)
        rules = [rule for rule in own if matches_end(rule.pattern, path)]
        if rules:
            return choose(rules)
        found = {
            signal: choose(r for s in self.rules.signals if s.covers(signal) for r in getattr(s, section) if matches_end(r.pattern, path))
            for signal in signals or ("",)
        }
        if len({None if rule is None else rule.spec for rule in found.values()}) > 1:
            self.problems.append(_tied_problem(section, path, found))
            return None
        return next(iter(found.values()))

    def _fitting(self, rules: Iterable[SpecRule], rank: int, what: str) -> SpecRule | None:
        rule = self._first(rules)
        if rule is not None and not fits_rank(rule.spec, rank):
            num_dims = min_rank(rule.spec)
            remedy = "Shorten the spec" if num_dims > rank else "Write null for a dim that is not sharded, or ... for all others"
            self.problems.append(
                f"{rule.where}: {rule.pattern}: the spec has {num_dims} dims, but {what} has {rank}"
                f" (dims that a scan or an index takes away are not counted). {remedy}"
            )
            return None
        return rule

    def _first(self, rules: Iterable[R]) -> R | None:
        chosen: R | None = None
        for rule in rules:
            if chosen is None:
                chosen = rule
                self._decided.add(id(rule))
            else:
                self._shadowed.setdefault(id(rule), chosen)
        return chosen

    def unreached(self) -> Iterator[str]:
        """Problems with rules that never decided anything."""
        for rule in self.rules.signals:
            if not any(matches(rule.pattern, signal) for signal in self._signals):
                yield f"{rule.where}: {rule.pattern}: no signal of the program matches. {nearest(rule.pattern, filter(None, self._signals))}"
                continue
            yield from self._unreached_in(rule)
        yield from self._silent("params", self.rules.params, "no parameter matches")
        yield from self._silent("optimizer", self.rules.optimizer, "no parameter matches that the spec fits")
        yield from self._silent("inputs", self.rules.inputs, "no argument of that name and rank")

    def _unreached_in(self, rule: SignalRule) -> Iterator[str]:
        yield from self._silent(f"{rule.pattern}: params", rule.params, "no parameter used below this signal matches")
        yield from self._silent(f"{rule.pattern}: optimizer", rule.optimizer, "no parameter used below this signal matches that the spec fits")
        below = [name for name, signals in self._tensors.items() if any(map(rule.covers, signals))]
        for section, named in (("tensors", rule.tensors), ("backward", rule.backward_tensors), ("save", rule.save)):
            for one in named:
                name = one.pattern if isinstance(one, SpecRule) else one.name
                reason = f"no tensor of that name below this signal. {nearest(name, below)}"
                yield from self._silent(f"{rule.pattern}: {section}", [one], reason)
        ranks = sorted({rank for s, found in self._out_ranks.items() if matches(rule.pattern, s) for rank in found})
        left = f"the floating values that leave this signal have rank {', '.join(map(str, ranks))}" if ranks else "no floating value leaves this signal (a tensor with a rule of its own does not count)"
        for section, out in (("out", rule.out), ("backward out", rule.backward_out)):
            if out is not None:
                yield from self._silent(f"{rule.pattern}: {section}", [out], f"{left}, none has the {min_rank(out.spec)} dims of this spec")

    def _silent(self, section: str, rules: Sequence[Rule], reason: str) -> Iterator[str]:
        for rule in rules:
            if id(rule) in self._decided:
                continue
            name = rule.pattern if isinstance(rule, SpecRule) else rule.name
            label = section if section.endswith((" out", "inputs")) else f"{section}: {name}"
            by = self._shadowed.get(id(rule))
            if by is not None:
                yield f"{rule.where}: {label}: shadowed: all that it matches is taken by the rule at {by.where}. Remove one of them or put this one first"
            else:
                yield f"{rule.where}: {label}: {reason if reason.endswith(('.', '?')) else f'{reason}.'} Remove the rule or correct its name"


def _tied_problem(section: str, path: str, found: Mapping[str, SpecRule | None]) -> str:
    seen = ", ".join(f"{signal or '(no signal)'} ({rule.where if rule else 'no rule'})" for signal, rule in found.items())
    place = next(rule.where for rule in found.values() if rule)
    return (
        f"{place}: {section}: the parameter {path} is used under several signals that say different things: {seen}. "
        f"A tied parameter needs a rule of its own: write {path.rsplit('/', 1)[-1]!r} under {section}: at the top of the file"
    )
