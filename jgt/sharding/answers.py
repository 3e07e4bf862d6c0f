"""The rules asked about the values of one program: their answers, and what was met on the way.

A rule that does not fit leaves its value without a spec. Problems are only collected here, and the caller raises all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from jax.sharding import AbstractMesh, NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, coarse_dims, partition_spec
from jgt.program.jaxpr import Equation, Place, Program, Var
from jgt.rules import AnyMatch, Match, Rules, SaveRule, SpecRule, expand, match_out, match_save, match_tensor, misfit_problems, prefixes
from jgt.sharding.placement import Surroundings

_R = TypeVar("_R", SpecRule, SaveRule)


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A program with every rule applied, and what the rules met in it. A value whose rule does not fit is left without a constraint.

    signals, tensors and out_ranks: see `jgt.rules.Seen`. experts: the number of experts that are called, by signal. matches: the answers
    that got a rule or a problem.
    """

    program: Program
    signals: frozenset[str]
    tensors: Mapping[str, frozenset[str]]
    out_ranks: Mapping[str, frozenset[int]]
    experts: Mapping[str, int]
    matches: tuple[AnyMatch, ...]
    problems: tuple[str, ...]


class Answers:
    """What the rules say about a program that is walked once. Lists and sets are filled on the way and read at the end, by `result`.

    signals: those that were met. experts: the number of experts that are called, by signal.
    """

    def __init__(self, rules: Rules, site: Surroundings):
        self._rules, self._site = rules, site
        self._matches: list[AnyMatch] = []
        self._problems: list[str] = []
        self.signals: set[str] = set()
        self._tensors: dict[str, set[str]] = {}
        self._out_ranks: dict[str, set[int]] = {}
        self.experts: dict[str, int] = {}

    def add(self, matches: Iterable[AnyMatch], problems: Iterable[str]) -> None:
        """Notes answers that were given elsewhere."""
        self._matches += matches
        self._problems += problems

    def result(self, program: Program) -> Rewritten:
        """The rewritten program with everything that was met in it."""
        return Rewritten(
            program=program,
            signals=frozenset(self.signals),
            tensors={name: frozenset(signals) for name, signals in self._tensors.items()},
            out_ranks={signal: frozenset(ranks) for signal, ranks in self._out_ranks.items()},
            experts=self.experts,
            matches=tuple(self._matches),
            problems=tuple(self._problems),
        )

    def sharding(self, dims: Dims, manual: AbstractMesh | None = None, free: int = 0) -> NamedSharding:
        """The sharding of these dims, on the mesh of a shard_map around if there is one."""
        return NamedSharding(self._site.mesh if manual is None else manual, partition_spec(dims, free=free))

    def save_of(self, equation: Equation, place: Place) -> dict[str, SaveRule]:
        """The rule for saving the tensor that an equation names, by that name; empty if there is none."""
        name = jx.tensor_name(equation)
        rule = None if name is None else self._noted(match_save(self._rules, name, place.path))
        if rule is not None and rule.action == "offload" and self._site.is_in_stage(place.path):
            self._problems.append(
                f"{rule.where}: save: {name}: offload is not possible inside a pipeline, whose buffers stay on the device. "
                "Use keep or recompute, or pipeline.remat"
            )
        return {} if rule is None or name is None else {name: rule}

    def add_saves(self, saves: dict[str, SaveRule], more: Mapping[str, SaveRule]) -> None:
        """Adds the rules of one more part of a region that is recomputed to those of the region, which may not contradict each other."""
        for name, rule in more.items():
            other = saves.setdefault(name, rule)
            if other.action != rule.action:
                self._problems.append(
                    f"{rule.where}: save: {name}: {rule.action} here, but {other.action} at {other.where}, in one region that is "
                    "recomputed. A region knows values by name only: give the two tensors different names"
                )

    def rules_of(
        self, equation: Equation, var: Var, place: Place, consumers: Sequence[Place], rank: int
    ) -> tuple[SpecRule | None, SpecRule | None, str]:
        """The rules of a value and of its cotangent, and what messages call it. A name decides before the signals that the value leaves."""
        name = jx.tensor_name(equation)
        if name is not None:
            self._tensors.setdefault(name, set()).add(place.path)
            forward = self._noted(match_tensor(self._rules, name, place.path, rank))
            backward = self._noted(match_tensor(self._rules, name, place.path, rank, backward=True))
            if forward or backward:
                return forward, backward, f"tensor {name} at {place.path or 'the top'}"
        if not jx.is_inexact(var):
            return None, None, ""
        forward, backward, left = None, None, ""
        # A value may leave several regions at once; the outermost one that has a rule decides, the others are noted as reached.
        for signal in reversed(prefixes(place.path)):
            region = tuple(signal.split("/")) if signal else ()
            if signal and any(not consumer.inside(region) for consumer in consumers):
                self._out_ranks.setdefault(signal, set()).add(rank)
                outer = self._noted(match_out(self._rules, signal, rank))
                outer_backward = self._noted(match_out(self._rules, signal, rank, backward=True))
                if forward is None and backward is None and (outer or outer_backward):
                    forward, backward, left = outer, outer_backward, signal
        return forward, backward, f"value that leaves {left}"

    def checked(self, rule: SpecRule | None, var: Var, place: Place, manual: AbstractMesh | None, what: str) -> NamedSharding | None:
        """The sharding that a rule gives a value; None if the rule does not fit, or if no axis is left to shard by."""
        if rule is None:
            return None
        shape = jx.shape_of(var)
        dims = expand(rule.spec, len(shape), range(place.num_vmaps))
        # A dim of size 1 broadcasts: there is nothing to shard. Manual axes are the shard_map's own business.
        wide = tuple(axes if size > 1 else () for axes, size in zip(dims, shape, strict=True))
        free = self._site.free_dims(wide, () if manual is None else manual.manual_axes)
        found = [
            *self._misfit_problems(rule, free, shape, dict((manual or self._site.mesh).shape), what),
            *self._site.stage_problems(rule, free, [place.path], what),
        ]
        self._problems += found
        if found or (manual is not None and set(manual.axis_names) == set(manual.manual_axes)):
            return None
        return self.sharding(coarse_dims(free, shape, dict((manual or self._site.mesh).shape)), manual, place.num_vmaps)

    def _misfit_problems(self, rule: SpecRule, dims: Dims, shape: tuple[int, ...], sizes: Mapping[str, int], what: str) -> Iterator[str]:
        even = tuple(() if size in self._site.uneven else axes for axes, size in zip(dims, shape, strict=True))
        return misfit_problems(rule, even, shape, sizes, what)

    def _noted(self, match: Match[_R]) -> _R | None:
        if match.decided:
            self._matches.append(cast(AnyMatch, match))
        return match.rule
