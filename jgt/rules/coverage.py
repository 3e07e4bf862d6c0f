"""Which rules never decide anything. Such a rule is an error: it is a typo, or a layout that was never applied.

`attn/kernle: [null, tensor]` matches no parameter, so the parameter is replicated and the run is slow or out of memory
without a word. jgt therefore collects what a program contains (`Seen`) and every match, and compares the rules with
that once at the end. A rule that matched only where an earlier rule had already decided is reported as shadowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from jgt.document import nearest
from jgt.rules.matching import Match, Slot
from jgt.rules.rules import ExpertsRule, OverlapRule, Rules, SaveRule, SignalRule, matches, matches_end, prefixes
from jgt.rules.spec import SpecRule, min_rank

_MOST_PATHS = 8
_FITS = " that the spec fits"

AnyMatch = Match[SpecRule] | Match[SaveRule] | Match[OverlapRule] | Match[ExpertsRule]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The parts of a program that rules can name, and the answers that it got.

    signals: the paths of its signals. params: the signals that use each parameter. tensors: the signals around each tensor name.
    out_ranks: the ranks of the floating values that leave each signal.
    """

    signals: AbstractSet[str] = frozenset()
    params: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    tensors: Mapping[str, AbstractSet[str]] = field(default_factory=dict[str, AbstractSet[str]])
    out_ranks: Mapping[str, AbstractSet[int]] = field(default_factory=dict[str, AbstractSet[int]])
    matches: tuple[AnyMatch, ...] = ()


def unreached(rules: Rules, seen: Seen) -> Iterator[str]:
    """A problem for each rule that decided nothing in this program."""
    coverage = _Coverage(seen)
    for index, rule in enumerate(rules.signals):
        yield from coverage.signal(index, rule)
    names = list(seen.params)
    yield from coverage.silent("params", rules.params, ("params",), "no parameter matches", names)
    yield from coverage.silent("optimizer", rules.optimizer, ("optimizer",), "no parameter matches that the spec fits", names)
    yield from coverage.silent("inputs", rules.inputs, ("inputs",), "no argument of that name and rank", named=False)


class _Coverage:
    def __init__(self, seen: Seen):
        self._seen = seen
        # The top of the program and every signal around a signal exist as well.
        self._signals = dict.fromkeys(prefix for signal in sorted(seen.signals) for prefix in prefixes(signal))
        self._decided = {slot for match in seen.matches for slot in match.decided}
        self._shadowed: dict[Slot, str] = {}
        for match in seen.matches:
            for slot, where in match.shadowed:
                # One of the rules that come before it is enough for a message.
                self._shadowed.setdefault(slot, where)

    def signal(self, index: int, rule: SignalRule) -> Iterator[str]:
        """The problems of one signal's rules; only one if no signal of the program matches at all."""
        if not any(matches(rule.pattern, signal) for signal in self._signals):
            yield f"{rule.where}: {rule.pattern}: no signal of the program matches. {nearest(rule.pattern, filter(None, self._signals))}"
            return
        at, label = ("signals", index), f"{rule.pattern}: "
        params = [path for path, signals in self._seen.params.items() if any(map(rule.covers, signals or [""]))]
        yield from self.silent(f"{label}params", rule.params, (*at, "params"), "no parameter used below this signal matches", params)
        reason = "no parameter used below this signal matches that the spec fits"
        yield from self.silent(f"{label}optimizer", rule.optimizer, (*at, "optimizer"), reason, params)
        # The names that a rule of this signal can reach, as advice in messages.
        below = [name for name, signals in self._seen.tensors.items() if any(map(rule.covers, signals))]
        yield from self._tensors(f"{label}tensors", rule.tensors, (*at, "tensors"), below)
        yield from self._tensors(f"{label}backward", rule.backward_tensors, (*at, "backward_tensors"), below)
        yield from self._tensors(f"{label}save", rule.save, (*at, "save"), below)
        yield from self._outputs(rule, at)
        if rule.overlap is not None:
            yield from self._problem(f"{rule.pattern}: overlap", rule.overlap.where, (*at, "overlap"), _nothing_to_hide(rule.overlap.axis))
        if rule.experts is not None:
            reason = "no jgt.signal.experts is called at this signal or below it."
            yield from self._problem(f"{rule.pattern}: experts", rule.experts.where, (*at, "experts"), reason)

    def _tensors(self, label: str, rules: Sequence[SpecRule] | Sequence[SaveRule], at: Slot, below: Sequence[str]) -> Iterator[str]:
        for index, rule in enumerate(rules):
            name = rule.pattern if isinstance(rule, SpecRule) else rule.name
            yield from self._problem(
                f"{label}: {name}", rule.where, (*at, index), f"no tensor of that name below this signal. {nearest(name, below)}"
            )

    def _outputs(self, rule: SignalRule, at: Slot) -> Iterator[str]:
        ranks = sorted({rank for signal, found in self._seen.out_ranks.items() if matches(rule.pattern, signal) for rank in found})
        if ranks:
            reason = f"the floating values that leave this signal have rank {', '.join(map(str, ranks))}"
        else:
            reason = "no floating value leaves this signal (a tensor with a rule of its own does not count)"
        for section, label, out in (("out", "out", rule.out), ("backward_out", "backward out", rule.backward_out)):
            if out is not None:
                dims = f"{reason}, none has the {min_rank(out.spec)} dims of this spec"
                yield from self._problem(f"{rule.pattern}: {label}", out.where, (*at, section), dims)

    def silent(
        self, label: str, rules: Sequence[SpecRule], at: Slot, reason: str, params: Sequence[str] = (), *, named: bool = True
    ) -> Iterator[str]:
        """The problems of a list of rules of which some may have decided nothing. params: the paths that they might have meant."""
        for index, rule in enumerate(rules):
            # A pattern that matches a parameter is not misspelt: its spec fits none.
            if any(matches_end(rule.pattern, path) for path in params):
                about = f"{reason.removesuffix(_FITS)}{_FITS}"
            else:
                about = f"{reason}. {_advice(rule.pattern, params)}" if params else reason
            yield from self._problem(f"{label}: {rule.pattern}" if named else label, rule.where, (*at, index), about)

    def _problem(self, label: str, where: str, slot: Slot, reason: str) -> Iterator[str]:
        # A rule that got its turn and did not fit counts as decided, because another problem says so.
        if slot in self._decided:
            return
        by = self._shadowed.get(slot)
        if by is not None:
            yield f"{where}: {label}: shadowed: all that it matches is taken by the rule at {by}. Remove one of them or put this one first"
        else:
            yield f"{where}: {label}: {reason if reason.endswith(('.', '?')) else f'{reason}.'} Remove the rule or correct its name"


def _nothing_to_hide(axis: str) -> str:
    return (
        f"no matmul of this signal waits for {axis}. It would read a tensor with a spec without {axis} under tensors: and one that "
        f"splits a dim over {axis} under backward: tensors:, or make a result that out: or tensors: splits over {axis}, but not along "
        "its last dim."
    )


def _advice(pattern: str, params: Sequence[str]) -> str:
    """The end of a path that looks most like a pattern, and the paths that there are."""
    num_levels = pattern.count("/") + 1
    ends = dict.fromkeys("/".join(path.split("/")[-num_levels:]) for path in params)
    paths = f"{', '.join(params[:_MOST_PATHS])}{', ..' if len(params) > _MOST_PATHS else ''}"
    return f"{nearest(pattern, ends, lists=False)} Its parameters: {paths}.".lstrip()
