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
from jgt.rules.pattern import matches, matches_end, prefixes
from jgt.rules.rules import Match, Rules, Slot
from jgt.rules.signals import ContextRule, ExpertsRule, OverlapRule, SaveRule, SignalRule
from jgt.rules.spec import SpecRule

_MOST_PATHS = 8
_FITS = " that the spec fits"

AnyMatch = Match[SpecRule] | Match[SaveRule] | Match[OverlapRule] | Match[ExpertsRule] | Match[ContextRule]
_Row = tuple[Slot, str, str, str]
"""A rule's slot, its file:line, its name in messages, and the reason for a message if it has decided nothing."""


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
    """A problem for each rule that decided nothing in this program; only one for the rules of a signal that the program does not have."""
    decided = {slot for match in seen.matches for slot in match.decided}
    # One of the rules that come before a rule is enough for a message.
    shadowed = dict(reversed([pair for match in seen.matches for pair in match.shadowed]))
    # The top of the program and every signal around a signal exist as well.
    signals = list(dict.fromkeys(prefix for signal in sorted(seen.signals) for prefix in prefixes(signal)))
    rows: list[_Row] = []
    for index, rule in enumerate(rules.signals):
        if any(matches(rule.pattern, signal) for signal in signals):
            rows += _rows_of_signal(rule, ("signals", index), seen)
        else:
            advice = nearest(rule.pattern, filter(None, signals))
            yield f"{rule.where}: {rule.pattern}: no signal of the program matches. {advice}"
    paths = list(seen.params)
    rows += _rows_of_parameters("params", rules.params, ("params",), "no parameter matches", paths)
    rows += _rows_of_parameters("optimizer", rules.optimizer, ("optimizer",), f"no parameter matches{_FITS}", paths)
    # A function without a batch leaves the default rule unused, which the user did not write.
    inputs = () if rules.is_batch_implied else rules.inputs
    rows += [(("inputs", n), rule.where, f"inputs: {rule.pattern}", "no argument of that name and rank") for n, rule in enumerate(inputs)]
    for slot, where, label, reason in rows:
        by = shadowed.get(slot)
        # A rule that got its turn and did not fit counts as decided, because another problem says so.
        if slot in decided:
            continue
        if by is not None:
            yield f"{where}: {label}: shadowed: all that it matches is taken by the rule at {by}. Remove one of them or put this one first"
        else:
            yield f"{where}: {label}: {reason if reason.endswith(('.', '?')) else f'{reason}.'} Remove the rule or correct its name"


def _rows_of_signal(rule: SignalRule, at: Slot, seen: Seen) -> Iterator[_Row]:
    params = [path for path, signals in seen.params.items() if any(map(rule.covers, signals or [""]))]
    none = "no parameter used below this signal matches"
    yield from _rows_of_parameters(f"{rule.pattern}: params", rule.params, (*at, "params"), none, params)
    yield from _rows_of_parameters(f"{rule.pattern}: optimizer", rule.optimizer, (*at, "optimizer"), f"{none}{_FITS}", params)
    # The names that a rule of this signal can reach, as advice in messages.
    below = [name for name, signals in seen.tensors.items() if any(map(rule.covers, signals))]
    named: list[tuple[str, str, Sequence[tuple[str, str]]]] = [
        ("tensors", "tensors", [(one.pattern, one.where) for one in rule.tensors]),
        ("backward_tensors", "backward", [(one.pattern, one.where) for one in rule.backward_tensors]),
        ("save", "save", [(one.name, one.where) for one in rule.save]),
    ]
    for section, label, tensors in named:
        for index, (name, where) in enumerate(tensors):
            reason = f"no tensor of that name below this signal. {nearest(name, below)}"
            yield (*at, section, index), where, f"{rule.pattern}: {label}: {name}", reason
    ranks = sorted({rank for signal, several in seen.out_ranks.items() if matches(rule.pattern, signal) for rank in several})
    reason = "no floating value leaves this signal (a tensor with a rule of its own does not count)"
    if ranks:
        reason = f"the floating values that leave this signal have rank {', '.join(map(str, ranks))}"
    for section, label, out in (("out", "out", rule.out), ("backward_out", "backward out", rule.backward_out)):
        if out is not None:
            yield (*at, section), out.where, f"{rule.pattern}: {label}", f"{reason}, none has the {out.rank} dims of this spec"
    if rule.overlap is not None:
        yield (*at, "overlap"), rule.overlap.where, f"{rule.pattern}: overlap", _nothing_to_hide(rule.overlap.axis)
    if rule.experts is not None:
        reason = "no jgt.signal.experts is called at this signal or below it."
        yield (*at, "experts"), rule.experts.where, f"{rule.pattern}: experts", reason
    if rule.context is not None:
        reason = f"no program at this signal or below it has the tensors {', '.join(rule.context.between)}. {nearest('', below)}"
        yield (*at, "context"), rule.context.where, f"{rule.pattern}: context", reason


def _rows_of_parameters(label: str, rules: Sequence[SpecRule], at: Slot, reason: str, params: Sequence[str]) -> Iterator[_Row]:
    """params: the paths that the rules might have meant."""
    for index, rule in enumerate(rules):
        about = reason
        # A pattern that matches a parameter is not misspelt: its spec fits none.
        if any(matches_end(rule.pattern, path) for path in params):
            about = f"{reason.removesuffix(_FITS)}{_FITS}"
        elif params:
            about = f"{reason}. {_advice(rule.pattern, params)}"
        yield (*at, index), rule.where, f"{label}: {rule.pattern}", about


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
