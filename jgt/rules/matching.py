"""Which rule decides: the first one that matches, in the order of the file.

A program asks one question for each of its parts: what is the spec of this parameter, of this named tensor, of the
values that leave this signal? Every function here answers one question with a `Match` and changes nothing, so the
answer depends on the rules and the question alone. A match also says which later rules matched but did not get a turn;
`jgt.rules.coverage` adds these up and reports rules that never decide anything.

The order of precedence is the same everywhere. For parameters and optimizer state, the rules at the top of the file
come first, then the rules of each signal, in file order. A rule of a signal covers everything below that signal, except
`out`, which is about the values that leave exactly that signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from jgt.rules.pattern import matches, matches_end
from jgt.rules.rules import Candidate, Match, Rules, RuleType, first_match
from jgt.rules.signals import ContextRule, ExpertsRule, OverlapRule, SaveRule
from jgt.rules.spec import SpecRule


def match_param(rules: Rules, path: str, signals: Sequence[str], rank: int) -> Match[SpecRule]:
    """The rule of a parameter that is used under these signals with `rank` dims (dims that a scan slices off not counted)."""
    return _match_parameter(rules, "params", path, signals, lambda found: _first_fitting(found, rank, f"the parameter {path}"))


def match_optimizer(rules: Rules, path: str, signals: Sequence[str], fits: Callable[[SpecRule], bool]) -> Match[SpecRule]:
    """The rule of a parameter's optimizer state, if it differs from the parameter's own. Rules whose spec does not fit are skipped."""
    # A pattern such as `**` is meant for all parameters whose dims it divides. The others keep their own layout.
    return _match_parameter(rules, "optimizer", path, signals, lambda found: first_match(one for one in found if fits(one[1])))


def match_tensor(rules: Rules, name: str, signal: str, rank: int, *, backward: bool = False) -> Match[SpecRule]:
    """The rule of a tensor with this name under this signal, or of its cotangent."""
    around = _around(rules, signal, "backward_tensors" if backward else "tensors")
    return _fitting((one for one in around if matches(one[1].pattern, name)), rank, f"the tensor {name!r} at the signal {signal!r}")


def match_out(rules: Rules, signal: str, rank: int, *, backward: bool = False) -> Match[SpecRule]:
    """The rule of a floating value of this rank that leaves exactly this signal, or of its cotangent."""
    section = "backward_out" if backward else "out"
    found: list[Candidate[SpecRule]] = []
    for index, rule in enumerate(rules.signals):
        out = rule.backward_out if backward else rule.out
        # The pattern has to match the signal itself. A value that leaves layers/attn need not leave `layers`.
        if out is not None and matches(rule.pattern, signal) and out.fits(rank):
            found.append((("signals", index, section), out))
    return first_match(found)


def match_save(rules: Rules, name: str, signal: str) -> Match[SaveRule]:
    """Whether a tensor with this name under this signal is kept, recomputed or offloaded for the backward pass."""
    return first_match(one for one in _around(rules, signal, "save") if matches(one[1].name, name))


def match_overlap(rules: Rules, signal: str) -> Match[OverlapRule]:
    """The axis whose sends the matmuls of this signal hide."""
    return first_match(_around(rules, signal, "overlap"))


def match_experts(rules: Rules, signal: str) -> Match[ExpertsRule]:
    """The rule of the experts that are called at this signal."""
    return first_match(_around(rules, signal, "experts"))


def match_context(rules: Rules, signal: str) -> Match[ContextRule]:
    """How the attention of this signal is split along the sequence."""
    return first_match(_around(rules, signal, "context"))


def _slots(rules: Iterable[RuleType], *where: str | int) -> Iterator[Candidate[RuleType]]:
    for index, rule in enumerate(rules):
        yield (*where, index), rule


def _around(rules: Rules, signal: str, section: str) -> Iterator[Candidate[Any]]:
    """The rules of a section for this signal and the signals around it: one, or a list, for each."""
    for index, rule in enumerate(rules.signals):
        found = getattr(rule, section) if rule.covers(signal) else None
        if isinstance(found, tuple):
            yield from _slots(cast("tuple[Any, ...]", found), "signals", index, section)
        elif found is not None:
            yield ("signals", index, section), found


def _fitting(candidates: Iterable[Candidate[SpecRule]], rank: int, what: str) -> Match[SpecRule]:
    """The first candidate; a problem if its spec has another number of dims. A later one that would fit gets no turn."""
    match = first_match(candidates)
    if match.rule is None or match.rule.fits(rank):
        return match
    num_dims = match.rule.rank
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
    fitting = [one for one in found if one[1].fits(rank)]
    return first_match(fitting) if fitting else _fitting(found, rank, what)


def _match_parameter(
    rules: Rules,
    section: Literal["params", "optimizer"],
    path: str,
    signals: Sequence[str],
    choose: Callable[[Iterable[Candidate[SpecRule]]], Match[SpecRule]],
) -> Match[SpecRule]:
    top: tuple[SpecRule, ...] = getattr(rules, section)
    whole_file = [one for one in _slots(top, section) if matches_end(one[1].pattern, path)]
    # The top of the file decides even if its spec does not fit. Rules of signals are not tried after it.
    if whole_file:
        return choose(whole_file)
    # A parameter without a signal is used at the top of the program, whose path is empty and which only `**` matches.
    around = {signal: _around(rules, signal, section) for signal in signals or ("",)}
    found = {signal: choose(one for one in below if matches_end(one[1].pattern, path)) for signal, below in around.items()}
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


def _tied_problem(section: str, path: str, found: Mapping[str, SpecRule | None]) -> str:
    seen = ", ".join(f"{signal or '(no signal)'} ({rule.where if rule else 'no rule'})" for signal, rule in found.items())
    place = next(rule.where for rule in found.values() if rule)
    return (
        f"{place}: {section}: the parameter {path} is used under several signals whose rules differ: {seen}. "
        f"A tied parameter needs a rule of its own: write {path.rsplit('/', 1)[-1]!r} under {section}: at the top of the file"
    )
