"""The answers of the rules about one program, and what the rules met in it.

The rewriter walks through the program and asks here about each value: which rule it has, which dims that rule gives it, and what a
backward pass saves of it. Every answer is noted, with the signals, tensors and ranks that the walk has met: from these,
`jgt.rules.unreached` finds the rules that never decide.

Problems are collected and not raised. A rule that does not fit gives no dims, so the walk leaves its value without a constraint. Whoever
calls the rewriter raises all problems at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from jax.sharding import AbstractMesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, coarse_dims
from jgt.program.jaxpr import Equation, Var
from jgt.program.places import Place
from jgt.program.tracing import tensor_name
from jgt.replacements.replacement import Inserted
from jgt.rules import AnyMatch, Match, Rules, SaveRule, SpecRule, match_out, match_save, match_tensor, prefixes
from jgt.sharding.placement import CallContext

_R = TypeVar("_R", SpecRule, SaveRule)


class RuleAnswers:
    """The rules asked about the values of one program. Each question fills the collections, which are read after the last one.

    matches: the answers that got a rule or a problem. signals: the paths of all places. tensors: the places of each tensor name.
    out_ranks: the ranks of the values that leave each signal. inserted: the constraints that follow.
    """

    def __init__(self, rules: Rules, site: CallContext):
        self._rules, self._site = rules, site
        self.matches: list[AnyMatch] = []
        self.problems: list[str] = []
        self.signals: set[str] = set()
        self.tensors: dict[str, set[str]] = {}
        self.out_ranks: dict[str, set[int]] = {}
        self.inserted: list[Inserted] = []

    def add(self, matches: Iterable[AnyMatch], problems: Iterable[str]) -> None:
        """Adds answers that came from elsewhere, and the problems found there."""
        self.matches += matches
        self.problems += problems

    def of_value(
        self, equation: Equation, var: Var, place: Place, consumers: Sequence[Place], rank: int
    ) -> tuple[SpecRule | None, SpecRule | None, str]:
        """The rules of a value and of its cotangent, and what messages call it. A name decides before the signals that the value leaves."""
        name = tensor_name(equation)
        if name is not None:
            self.tensors.setdefault(name, set()).add(place.path)
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
                self.out_ranks.setdefault(signal, set()).add(rank)
                outer = self._noted(match_out(self._rules, signal, rank))
                outer_backward = self._noted(match_out(self._rules, signal, rank, backward=True))
                if forward is None and backward is None and (outer or outer_backward):
                    forward, backward, left = outer, outer_backward, signal
        return forward, backward, f"value that leaves {left}"

    def dims_of(self, rule: SpecRule | None, var: Var, place: Place, manual: AbstractMesh | None, what: str) -> Dims | None:
        """The dims that a rule gives a value; None if the rule does not fit, or if no axis is left to shard by."""
        if rule is None:
            return None
        shape = jx.shape_of(var)
        dims = rule.dims(len(shape), range(place.num_vmaps))
        # A dim of size 1 broadcasts: there is nothing to shard. Manual axes are the shard_map's own business. A symbolic size can be asked
        # whether it equals a number, not whether it is larger.
        wide = tuple(axes if size not in (0, 1) else () for axes, size in zip(dims, shape, strict=True))
        free = self._site.free_dims(wide, () if manual is None else manual.manual_axes)
        sizes = dict((manual or self._site.mesh).shape)
        even = tuple(() if size in self._site.uneven else axes for axes, size in zip(free, shape, strict=True))
        problems = [
            *rule.misfit_problems(even, shape, sizes, what).values(),
            *self._site.stage_problems(rule, free, [place.path], what),
        ]
        self.problems += problems
        if problems or (manual is not None and set(manual.axis_names) == set(manual.manual_axes)):
            return None
        return coarse_dims(free, shape, sizes)

    def save_of(self, equation: Equation, place: Place) -> dict[str, SaveRule]:
        """The save rule of a tensor, by its name; empty if the equation names none, or if no rule does."""
        name = tensor_name(equation)
        rule = None if name is None else self._noted(match_save(self._rules, name, place.path))
        if rule is not None and rule.action == "offload" and self._site.is_in_stage(place.path):
            self.problems.append(
                f"{rule.where}: save: {name}: offload is not possible inside a pipeline, whose buffers stay on the device. "
                "Use keep or recompute, or pipeline.remat"
            )
        return {} if rule is None or name is None else {name: rule}

    def add_saves(self, saves: dict[str, SaveRule], more: Mapping[str, SaveRule]) -> None:
        """Adds save rules of one more part of a region, by name. Two different actions for one name are a problem."""
        for name, rule in more.items():
            other = saves.setdefault(name, rule)
            if other.action != rule.action:
                self.problems.append(
                    f"{rule.where}: save: {name}: {rule.action} here, but {other.action} at {other.where}, in one region that is "
                    "recomputed. A region knows values by name only: give the two tensors different names"
                )

    def _noted(self, match: Match[_R]) -> _R | None:
        if match.decided:
            self.matches.append(cast(AnyMatch, match))
        return match.rule
