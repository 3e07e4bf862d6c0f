"""The search: estimate all layouts, plan the most promising one, and begin again.

Layouts are planned in the order of their estimates. Every other one is the most promising neighbour of the best plan so far, which differs
from it in one thing, because a plan knows more than an estimate. The search ends after some plans in a row that are not faster, or when the
time is over. So the answer is always a plan of the real program, and estimates only say in which order to look.

Invariant: a search that is interrupted has the best layout of all plans that were ready.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jgt.document import InputError
from jgt.planner import Target

from .estimate import Estimate, Estimator, Step
from .layout import Candidate, num_changes
from .plans import PlanFigures, Plans
from .space import OpenLayout, candidates

_FIRST, _REFUSED = 6, 2
"""_FIRST: how many layouts to try until one compiles. _REFUSED: an axis size is dropped after this many refusals without a success."""
_PATIENCE, _FASTER = 14, 0.995
"""The search ends after _PATIENCE plans in a row of which none has brought the best below _FASTER of its seconds."""
_NOTABLE, _POLL = 0.01, 0.5
_ASKED, _OF_REFUSED_SIZE, _TOO_LARGE, _OPEN = range(4)
_REASONS = {
    _OF_REFUSED_SIZE: "of sizes that were refused",
    _TOO_LARGE: "too large for the memory, by estimate",
    _OPEN: "less promising, by estimate",
}


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout that was planned. estimate: what was expected before its plan; None for the first."""

    candidate: Candidate
    plan: PlanFigures
    estimate: Estimate | None

    def why_slower(self, best: PlannedLayout) -> str:
        """The largest part of the difference to the best plan: `+9%: waits 4.9 s for tensor, the best 0`."""
        mine, its = self.plan, best.plan
        differences: list[tuple[float, str]] = []
        for axes in {*(mine.exposed or {}), *(its.exposed or {})}:
            here, there = ((p.exposed or {}).get(axes, 0.0) for p in (mine, its))
            differences.append((here - there, f"waits {here:.2g} s for {axes}, the best {there:.2g}"))
        compute = [p.seconds - sum((p.exposed or {}).values()) for p in (mine, its)]
        work = mine.flops / its.flops - 1 if its.flops else 0.0
        what = f"computes {work:.0%} more" if work > _NOTABLE else "its kernels are slower"
        _, text = max([*differences, (compute[0] - compute[1], what)])
        return f"+{mine.seconds / its.seconds - 1:.0%}: {text}"


@dataclass(kw_only=True)
class LayoutSearch:
    """A search over the layouts of one run.

    opened: the run, and what of its layout is open. seconds: the time that it may take. top: the number of plans that fit which the answer
    should have at least. say: prints a line of progress. space: all layouts. begin: the index of a layout to plan early, such as the one
    that the run's file has. Raises InputError if there is no layout.
    """

    opened: OpenLayout
    target: Target
    plans: Plans
    seconds: float
    top: int
    say: Callable[[str], None]
    space: Sequence[Candidate] = ()
    begin: int | None = None
    tries: list[PlannedLayout] = field(default_factory=list[PlannedLayout])
    started: float = field(default_factory=time.monotonic)
    is_interrupted: bool = False
    estimator: Estimator | None = None
    _without_gain: int = 0
    _pending: list[tuple[int, concurrent.futures.Future[PlanFigures], Estimate]] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set[int])
    _refusals: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    _compiled: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def __post_init__(self) -> None:
        self.space = self.space or candidates(self.opened, self.target.num_devices)

    def run(self) -> None:
        """Searches until it is done, the time is over, or Ctrl-C. Raises InputError if not a single layout can be compiled."""
        try:
            self._first()
            self._rest()
        except KeyboardInterrupt:
            self.is_interrupted = True
            for index, plan, estimate in self._pending:
                if plan.done():
                    self._take(index, plan.result(), estimate)
            self.say("Interrupted: this is the best so far")
        finally:
            self.plans.close()

    @property
    def best(self) -> PlannedLayout | None:
        """The fastest plan that fits."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[PlannedLayout]:
        """The plans that fit, the fastest first."""
        return sorted((t for t in self.tries if t.plan.is_usable), key=lambda t: t.plan.seconds)

    def pruned(self) -> dict[str, int]:
        """The numbers of layouts that were not planned, by reason."""
        counts = Counter([] if self.estimator is None else self._states().tolist())
        return {reason: counts[state] for state, reason in _REASONS.items() if counts[state]}

    # -- steps ------------------------------------------------------------------------------------------------------------

    def _first(self) -> None:
        """The first plan, of a layout that needs little memory and is likely to compile, says what any step of this model has.

        It is a plan of one part of the batch as if that were the whole: a plan does not know what a loop over parts keeps inside.
        """
        problems: list[str] = []
        for index in sorted(range(len(self.space)), key=lambda index: _simplicity(self.space[index]))[:_FIRST]:
            one = self.space[index]
            part = () if one.accumulate == 1 else ("train.accumulate=1", f"train.batch={one.rows_at_once}")
            plan = self.ask(index, *part).result()
            if not plan.problems:
                self.estimator = Estimator(Step.of(one, plan, self.opened.run.config), self.target, self.space)
                if one.accumulate == 1:
                    self._take(index, plan, None)
                return
            problems += plan.problems
        raise InputError(list(dict.fromkeys(problems)))

    def _rest(self) -> None:
        assert self.estimator is not None
        while True:
            # One more than there are workers, so that none of them waits for an older plan.
            while not self._is_late and len(self._pending) <= self.plans.workers:
                if (index := self._next()) is None:
                    break
                self._pending.append((index, self.ask(index), self.estimator.estimate(index)))
            if not self._pending:
                return
            concurrent.futures.wait([self._pending[0][1]], timeout=_POLL)
            # In the order of the questions and one before each decision, so that a search whose plans are stored decides the same again.
            while self._pending and self._pending[0][1].done():
                index, plan, estimate = self._pending.pop(0)
                self._take(index, plan.result(), estimate)
                if not self._is_late:
                    break
            if self._is_late and self._pending:
                self.say(f"{self.seconds:g} s are over: {len(self._pending)} plans were not ready")
                return

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def _next(self) -> int | None:
        """The index of the layout to plan next; None if no other is worth it."""
        assert self.estimator is not None
        if self.begin is not None and self.begin not in self._asked:
            return self.begin
        if self._without_gain >= _PATIENCE and len(self.ranked()) >= self.top:
            return None
        indices = np.flatnonzero(self._states() == _OPEN)
        indices = indices[np.argsort(self.estimator.seconds[indices], kind="stable")]
        if len(self._asked) % 2 and (best := self.best) is not None:
            neighbours = (index for index in indices if num_changes(self.space[index], best.candidate) == 1)
            return int(next(neighbours, indices[0])) if len(indices) else None
        return int(indices[0]) if len(indices) else None

    def _states(self) -> npt.NDArray[np.int_]:
        """Whether each layout was asked for, has a size of an axis with which none was accepted, is too large by estimate, or is open."""
        assert self.estimator is not None
        refused = {pair for pair, count in self._refusals.items() if count >= _REFUSED} - self._compiled
        states = np.where(self.estimator.peak_bytes <= self.target.usable_bytes, _OPEN, _TOO_LARGE)
        states[[index for index, one in enumerate(self.space) if not refused.isdisjoint(one.mesh)]] = _OF_REFUSED_SIZE
        states[list(self._asked)] = _ASKED
        return states

    def ask(self, index: int, *part: str) -> concurrent.futures.Future[PlanFigures]:
        """Asks for the plan of a layout by its index. part: overrides that make one part of the batch the whole."""
        if not part:
            self._asked.add(index)
        basis = ("pipeline=null", f"devices.virtual_cpu={self.target.num_devices}")
        return self.plans.ask(self.opened.file.adding(*basis, *self.space[index].overrides, *part), self.target)

    def _take(self, index: int, plan: PlanFigures, estimate: Estimate | None) -> None:
        assert self.estimator is not None
        candidate, best = self.space[index], self.best
        self.tries.append(PlannedLayout(candidate=candidate, plan=plan, estimate=estimate))
        # The dims of a model do not divide by every size. The space has only numbers of rows and of stages that are possible.
        possible = (*candidate.roles.batch, *([] if candidate.stages is None else [candidate.stages.axis]))
        sizes = [(axis, size) for axis, size in candidate.mesh if axis not in possible]
        if plan.problems:
            self._refusals.update(sizes)
        else:
            self._compiled.update(sizes)
            self.estimator.learn(index, plan)
            is_faster = plan.is_usable and (best is None or plan.seconds < _FASTER * best.plan.seconds)
            self._without_gain = 0 if is_faster or best is None else self._without_gain + 1
        self.say(f"[{time.monotonic() - self.started:4.0f} s] {len(self.tries):3}  {_outcome(plan):24} {candidate.text}")


def _simplicity(candidate: Candidate) -> tuple[object, ...]:
    """Layouts that need little memory and few collectives come first."""
    roles, tensor = candidate.roles, candidate.size(candidate.roles.tensor)
    split = candidate.size((*roles.weights, *roles.tensor, *roles.experts))
    return (candidate.stages is not None, candidate.accumulate > 1, candidate.remat not in ("block", None), -split, tensor, candidate.rows)


def _outcome(plan: PlanFigures) -> str:
    if plan.problems:
        return "refused"
    size = f"{plan.peak_bytes / 2**30:.0f} GiB"
    return f"{plan.seconds:.4g} s, {size}" if plan.fits else f"{size} do not fit"
