"""Rules as data: which pattern, which spec, which line; and the globs that patterns are.

`Rules` mirrors the YAML. It has a `SignalRule` for each entry under `signals:`, and each of these has a `SpecRule` for
each line under `params:`, `tensors:` and so on. Everything is frozen and hashable: a traced program depends on its rules
as it does on shapes, so they can be part of a cache's key.

Patterns are globs over paths such as layers/attn (signals) or layers/attn/out/kernel (parameters). `*` matches within
one level, `**` any number of levels, `?` one character, and `{a,b}` either text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from jgt.document import nearest
from jgt.rules.spec import SpecRule, axes_in

_TOKEN = re.compile(r"\*|\?|\{[^{}]*\}|[^*?{}]+|.")


# The rewriter asks about every pattern for every value that a program computes, and most paths occur again and again.
@functools.lru_cache(maxsize=1 << 16)
def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a whole path. An empty path is the top of the program; only `**` matches it."""
    # The set of all levels that the pattern may have reached, advanced part by part. A regular expression would try them one after
    # another, which takes exponential time for patterns such as {,a}{,a}{,a}...
    levels = path.split("/") if path else []
    places = {0}
    for part in pattern.split("/"):
        if part == "**":
            # `**` reaches every level behind the earliest place, so the later places add nothing.
            places = set(range(min(places), len(levels) + 1))
        else:
            places = {n + 1 for n in places if n < len(levels) and _level_matches(part, levels[n])}
        if not places:
            return False
    return len(levels) in places


def _level_matches(part: str, level: str) -> bool:
    places = {0}
    for token in _TOKEN.findall(part):
        if token == "*":
            places = set(range(min(places), len(level) + 1))
        elif token == "?":
            places = {n + 1 for n in places if n < len(level)}
        else:
            texts = token[1:-1].split(",") if token[0] == "{" and token[-1] == "}" else [token]
            places = {n + len(text) for n in places for text in texts if level.startswith(text, n)}
        if not places:
            return False
    return len(level) in places


def matches_end(pattern: str, path: str) -> bool:
    """Whether a glob matches the last levels of a path: `out/kernel` matches `layers/attn/out/kernel`."""
    return matches(f"**/{pattern}", path)


def prefixes(path: str) -> list[str]:
    """A signal path and all paths around it, innermost first. For a/b these are a/b, a, and the empty path of the whole program."""
    levels = path.split("/") if path else []
    return ["/".join(levels[:n]) for n in range(len(levels), -1, -1)]


Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, kw_only=True)
class SaveRule:
    """What becomes of a named tensor until the backward pass: it is kept on the device, recomputed, or offloaded to the host."""

    name: str
    action: Action
    # Rules are equal wherever they were written, so a cache whose key contains them finds them again.
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class OverlapRule:
    """The mesh axis whose sends the matmuls of a signal hide."""

    axis: str
    where: str = field(default="rules", compare=False)


ExchangeKind = Literal["all-to-all"]
Overflow = Literal["rounds", "drop"]


@dataclass(frozen=True, kw_only=True)
class ExpertsRule:
    """The mesh axis that holds the experts of a signal, and how rows travel to them.

    exchange: an all-to-all of arrays with a fixed capacity. room: the capacity factor, which is the rows that each pair of devices has room
    for, over their number if all experts are chosen equally often. over: what becomes of further rows.
    """

    axis: str
    exchange: ExchangeKind = "all-to-all"
    room: float = 1.25
    over: Overflow = "rounds"
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True, kw_only=True)
class SignalRule:
    """What happens at the signals that `pattern` matches.

    params, optimizer: specs of parameters that are used below the signal, and of their optimizer state. tensors, save: specs of
    tensors that are named below it, and whether they are kept. out: the spec of floating values that are computed inside
    the signal and used outside. backward_out, backward_tensors: specs of the cotangents, where they differ. overlap: what the matmuls below
    the signal hide. experts: where the experts are that are called below it.
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
    where: str = field(default="rules", compare=False)

    def covers(self, signal: str) -> bool:
        """Whether the pattern matches this signal or one around it."""
        return any(matches(self.pattern, prefix) for prefix in prefixes(signal))

    def spec_rules(self) -> Iterator[SpecRule]:
        """Every spec of this rule."""
        yield from (*self.params, *self.optimizer, *self.tensors, *self.backward_tensors)
        yield from (rule for rule in (self.out, self.backward_out) if rule is not None)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one program, in order of precedence.

    params, optimizer: specs of parameters under any signal; a tied parameter, which is used under several, needs such a rule.
    inputs: specs of the arguments that are not parameters. default: what a parameter without a rule gets; None makes it an error.
    """

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

    def axes_of_parameters(self) -> frozenset[str]:
        """The axes that a rule splits parameters over, or matmuls or experts; not those of the optimizer state alone."""
        specs = [*self.params, *(spec for rule in self.signals for spec in rule.params)]
        others = [part.axis for rule in self.signals for part in (rule.overlap, rule.experts) if part is not None]
        return frozenset(axis for spec in specs for axis in axes_in(spec.spec)).union(others)

    def where_of(self, signal: str) -> str:
        """The file:line of the first rule for a signal, or for the nearest signal around it that has one; empty if there is none."""
        for path in prefixes(signal):
            for rule in self.signals:
                if path and matches(rule.pattern, path):
                    return rule.where
        return ""

    def axis_problems(self, axes: Iterable[str]) -> Iterator[str]:
        """A problem for each axis in a spec that a mesh with these axes does not have."""
        known = tuple(axes)
        named = [(rule.where, rule.pattern, axis) for rule in self.spec_rules() for axis in dict.fromkeys(axes_in(rule.spec))]
        named += [(rule.overlap.where, f"{rule.pattern}: overlap", rule.overlap.axis) for rule in self.signals if rule.overlap]
        named += [(rule.experts.where, f"{rule.pattern}: experts", rule.experts.axis) for rule in self.signals if rule.experts]
        for where, what, axis in named:
            if axis not in known:
                yield (
                    f"{where}: {what}: the mesh has no axis {axis!r}. {nearest(axis, known)} "
                    f"To turn the axis off, give it the size 1 in mesh: {{{axis}: 1}}"
                )
