"""Which rule decides: the first one that matches, in the order of the file.

A program asks one question for each of its parts: what is the spec of this parameter, of this named tensor, of the
values that leave this signal? Every function here answers one question with a `Match` and changes nothing, so the
answer depends on the rules and the question alone. A match also says which later rules matched but did not get a turn;
`jgt.rules.coverage` adds these up and reports rules that never decide anything.

The order of precedence is the same everywhere. For parameters and optimizer state, the rules at the top of the file
come first, then those of each signal, in file order. A rule of a signal covers everything below that signal, except
`out`, which is about the values that leave exactly that signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from jgt.rules.rules import ExpertsRule, OverlapRule, Rules, SaveRule, SignalRule, matches, matches_end
from jgt.rules.spec import SpecRule, fits_rank, min_rank

_R = TypeVar("_R", SpecRule, SaveRule, OverlapRule, ExpertsRule)

Slot = tuple[str | int, ...]
"""The position of a rule in a `Rules`, for example ("signals", 2, "tensors", 0).

Two rules with the same content are equal, so a rule by itself does not say which line of the file decided.
"""

Candidate = tuple[Slot, _R]


@dataclass(frozen=True, kw_only=True)
class Match(Generic[_R]):
    """The answer to one question.

    rule: the rule that decides; None if no rule matches, or if the first one is wrong for this part of the program.
    decided: the slots of the rules that got a turn. shadowed: the slots of later rules that match too, each with the file:line
    of the rule that came before it. problems: messages about rules that match but do not fit.
    """

    rule: _R | None = None
    decided: tuple[Slot, ...] = ()
    shadowed: tuple[tuple[Slot, str], ...] = ()
    problems: tuple[str, ...] = ()


def match_param(rules: Rules, path: str, signals: Sequence[str], rank: int) -> Match[SpecRule]:
    """The rule of a parameter that is used under these signals with `rank` dims (dims that a scan slices off not counted)."""
    return _match_parameter(rules, "params", path, signals, lambda found: _first_fitting(found, rank, f"the parameter {path}"))


def match_optimizer(rules: Rules, path: str, signals: Sequence[str], fits: Callable[[SpecRule], bool]) -> Match[SpecRule]:
    """The rule of a parameter's optimizer state, if it differs from the parameter's own. Rules whose spec does not fit are skipped."""
    # A pattern such as `**` is meant for all parameters whose dims it divides. The others keep their own layout.
    return _match_parameter(rules, "optimizer", path, signals, lambda found: _first(one for one in found if fits(one[1])))


def match_input(rules: Rules, path: str, rank: int, *other_paths: str, is_state: bool = False) -> Match[SpecRule]:
    """The rule of an argument that is not a parameter, by any of its paths. A spec with more dims than the argument does not match it.

    is_state: only patterns that name something match. A pattern of wildcards alone is meant for the batch, and state has no rows.
    """
    paths = (path, *other_paths)
    found = (one for one in _slots(rules.inputs, "inputs") if not is_state or _names_something(one[1].pattern))
    # No upper limit: one rule may serve inputs of several ranks, and their further dims stay whole.
    return _first(one for one in found if rank >= min_rank(one[1].spec) and any(matches_end(one[1].pattern, p) for p in paths))


def _names_something(pattern: str) -> bool:
    return any(level not in ("*", "**") for level in pattern.split("/"))


def match_tensor(rules: Rules, name: str, signal: str, rank: int, *, backward: bool = False) -> Match[SpecRule]:
    """The rule of a tensor with this name under this signal, or of its cotangent."""
    section = "backward_tensors" if backward else "tensors"
    found = (
        one
        for index, rule in _covering(rules, signal)
        for one in _slots(rule.backward_tensors if backward else rule.tensors, "signals", index, section)
        if matches(one[1].pattern, name)
    )
    return _fitting(found, rank, f"the tensor {name!r} at the signal {signal!r}")


def match_out(rules: Rules, signal: str, rank: int, *, backward: bool = False) -> Match[SpecRule]:
    """The rule of a floating value of this rank that leaves exactly this signal, or of its cotangent."""
    section = "backward_out" if backward else "out"
    found: list[Candidate[SpecRule]] = []
    for index, rule in enumerate(rules.signals):
        out = rule.backward_out if backward else rule.out
        # The pattern has to match the signal itself. A value that leaves layers/attn need not leave `layers`.
        if out is not None and matches(rule.pattern, signal) and fits_rank(out.spec, rank):
            found.append((("signals", index, section), out))
    return _first(found)


def match_save(rules: Rules, name: str, signal: str) -> Match[SaveRule]:
    """Whether a tensor with this name under this signal is kept, recomputed or offloaded for the backward pass."""
    covering = _covering(rules, signal)
    return _first(one for index, rule in covering for one in _slots(rule.save, "signals", index, "save") if matches(one[1].name, name))


def match_overlap(rules: Rules, signal: str) -> Match[OverlapRule]:
    """The axis whose sends the matmuls of this signal hide."""
    return _first((("signals", index, "overlap"), rule.overlap) for index, rule in _covering(rules, signal) if rule.overlap is not None)


def match_experts(rules: Rules, signal: str) -> Match[ExpertsRule]:
    """Where the experts are that are called at this signal."""
    return _first((("signals", index, "experts"), rule.experts) for index, rule in _covering(rules, signal) if rule.experts is not None)


def _slots(rules: Iterable[_R], *where: str | int) -> Iterator[Candidate[_R]]:
    for index, rule in enumerate(rules):
        yield (*where, index), rule


def _covering(rules: Rules, signal: str) -> Iterator[tuple[int, SignalRule]]:
    return ((index, rule) for index, rule in enumerate(rules.signals) if rule.covers(signal))


def _first(candidates: Iterable[Candidate[_R]]) -> Match[_R]:
    found = list(candidates)
    if not found:
        return Match()
    (slot, rule), *later = found
    return Match(rule=rule, decided=(slot,), shadowed=tuple((other, rule.where) for other, _ in later))


def _fitting(candidates: Iterable[Candidate[SpecRule]], rank: int, what: str) -> Match[SpecRule]:
    """The first candidate; a problem if its spec has another number of dims. A later one that would fit gets no turn."""
    match = _first(candidates)
    if match.rule is None or fits_rank(match.rule.spec, rank):
        return match
    num_dims = min_rank(match.rule.spec)
    remedy = "Shorten the spec" if num_dims > rank else "Write null for a dim that is not sharded, or ... for all others"
    problem = (
        f"{match.rule.where}: {match.rule.pattern}: the spec has {num_dims} dims, but {what} has {rank}"
        f" (dims that a scan or an index takes away are not counted). {remedy}"
    )
    return Match(decided=match.decided, shadowed=match.shadowed, problems=(problem,))


def _first_fitting(candidates: Iterable[Candidate[SpecRule]], rank: int, what: str) -> Match[SpecRule]:
    """The first candidate with the right number of dims; a problem of the first one if there is none."""
    found = list(candidates)
    # Kernels of dense layers and of convolutions have one name, and each a rule of its rank.
    fitting = [one for one in found if fits_rank(one[1].spec, rank)]
    return _first(fitting) if fitting else _fitting(found, rank, what)


def _match_parameter(
    rules: Rules,
    section: Literal["params", "optimizer"],
    path: str,
    signals: Sequence[str],
    choose: Callable[[Iterable[Candidate[SpecRule]]], Match[SpecRule]],
) -> Match[SpecRule]:
    top = rules.params if section == "params" else rules.optimizer
    whole_file = [one for one in _slots(top, section) if matches_end(one[1].pattern, path)]
    # The top of the file decides even if its spec does not fit. Rules of signals are not tried after it.
    if whole_file:
        return choose(whole_file)
    # A parameter without a signal is used at the top of the program, whose path is empty and which only `**` matches.
    found = {signal: choose(_below(rules, section, path, signal)) for signal in signals or ("",)}
    merged = Match[SpecRule](
        rule=next(iter(found.values())).rule,
        decided=tuple(slot for match in found.values() for slot in match.decided),
        shadowed=tuple(pair for match in found.values() for pair in match.shadowed),
        # One rule of an outer signal may answer for several signals below it.
        problems=tuple(dict.fromkeys(problem for match in found.values() for problem in match.problems)),
    )
    # A tied parameter is used under several signals. They may all have a rule, as long as the rules agree.
    if len({None if match.rule is None else match.rule.spec for match in found.values()}) > 1:
        problem = _tied_problem(section, path, {signal: match.rule for signal, match in found.items()})
        return Match(decided=merged.decided, shadowed=merged.shadowed, problems=(*merged.problems, problem))
    return merged


def _below(rules: Rules, section: str, path: str, signal: str) -> Iterator[Candidate[SpecRule]]:
    for index, rule in _covering(rules, signal):
        for one in _slots(rule.params if section == "params" else rule.optimizer, "signals", index, section):
            if matches_end(one[1].pattern, path):
                yield one


def _tied_problem(section: str, path: str, found: Mapping[str, SpecRule | None]) -> str:
    seen = ", ".join(f"{signal or '(no signal)'} ({rule.where if rule else 'no rule'})" for signal, rule in found.items())
    place = next(rule.where for rule in found.values() if rule)
    return (
        f"{place}: {section}: the parameter {path} is used under several signals whose rules differ: {seen}. "
        f"A tied parameter needs a rule of its own: write {path.rsplit('/', 1)[-1]!r} under {section}: at the top of the file"
    )
