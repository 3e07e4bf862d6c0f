"""The search: estimate all layouts, plan the most promising, learn from the plan, and begin again.

The first plans are of different kinds of layouts, so that each kind has been compiled once before the estimates decide. Then whatever
should be fastest is planned next, until nothing is left that should be faster than what was found, or until the time is over. So the
answer is always a plan of the real program, and estimates only say in which order to look.

Invariant: a search that is interrupted has the best layout of all plans that were ready.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from jgt.document import InputError
from jgt.hardware.chip import Target

from .estimate import Estimate, Estimator
from .layout import STAGE, Candidate, form_of, kind_of, layout_text, num_changes, simplicity
from .plans import Answer, Plans, Question
from .step import Shape, Step, rows_at_once, send_time

_MARGIN = 1.25
"""A layout is planned if its estimated peak is at most this many times the memory: estimates are wrong, too."""
_GAIN = 1.02
"""A search ends where no estimate is shorter than the best plan by less than this."""
_NEW = 1.3
"""A kind of layout that has no plan yet is planned if its estimate is at most this many times the best."""
_NEAR = 1.12
"""At the end, layouts are planned whose estimate is at most this many times the best plan."""
_FIRST, _REFUSED = 6, 2
"""So many layouts are tried for the first plan, which needs to compile and not to fit. A size of an axis is given up after so many
refused layouts, if none with it has compiled: it does not divide what it would split."""
_EXTRA, _FASTER = 0.4, 0.995
"""A search also plans layouts that should be a little slower, because estimates of layouts that differ by little are often in the wrong
order. It ends after so many of them, as a share of the other plans, that did not bring the best below this share of its seconds."""
_POLL = 0.5


@dataclass(frozen=True, kw_only=True)
class Try:
    """A layout that was planned. estimate: what was expected before its plan; None for the first."""

    candidate: Candidate
    plan: Answer
    estimate: Estimate | None


@dataclass(kw_only=True)
class LayoutSearch:
    """A search over the layouts of one run on one target.

    question: the run, without overrides of its layout. begin: the index of a layout to plan early, such as the one that the run's file has.
    model: what is known of it. say: prints a line of progress. top: the number of plans that fit which the answer should have at least.
    """

    question: Question
    target: Target
    space: Sequence[Candidate]
    plans: Plans
    seconds: float
    top: int
    say: Callable[[str], None]
    begin: int | None = None
    model: Shape = field(default_factory=Shape)
    tries: list[Try] = field(default_factory=list[Try])
    started: float = field(default_factory=time.monotonic)
    is_interrupted: bool = False
    _estimator: Estimator | None = None
    _extra: int = 0
    _pending: deque[tuple[int, concurrent.futures.Future[Answer], Estimate]] = field(
        default_factory=deque[tuple[int, "concurrent.futures.Future[Answer]", Estimate]]
    )
    _asked: set[int] = field(default_factory=set[int])
    _refusals: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    _compiled: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

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
    def best(self) -> Try | None:
        """The fastest plan that fits."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[Try]:
        """The plans that fit, the fastest first."""
        return sorted((t for t in self.tries if t.plan.is_usable), key=lambda t: t.plan.seconds)

    @property
    def estimator(self) -> Estimator | None:
        """What estimates layouts; None before the first plan."""
        return self._estimator

    def pruned(self) -> dict[str, int]:
        """How many layouts were not planned, by reason."""
        if (estimator := self._estimator) is None:
            return {}
        best = math.inf if self.best is None else self.best.plan.seconds
        is_refused, is_open = self._refused(), self._open()
        is_slower = estimator.seconds * _GAIN >= best
        small = self._may_fit()
        found = {
            "of sizes that were refused": is_refused,
            "too large for the memory, by estimate": is_open & ~small,
            "slower than the best, by estimate": is_open & small & is_slower,
            "not reached": is_open & small & ~is_slower,
        }
        return {reason: int(count) for reason, these in found.items() if (count := np.count_nonzero(these))}

    # -- steps ------------------------------------------------------------------------------------------------------------

    def _first(self) -> None:
        """The first plan, of a layout that needs little memory and is likely to compile: what any step of this model has."""
        problems: list[str] = []
        for index in sorted(range(len(self.space)), key=lambda index: simplicity(self.space[index]))[:_FIRST]:
            asked = self.ask(index)
            whole = self._ask_without_parts(self.space[index]) if self.space[index].accumulate > 1 else asked
            plan, step = asked.result(), whole.result()
            if not plan.problems and not step.problems:
                self._estimator = Estimator(Step.of(self.space[index], step, self.target, self.model), send_time(self.target), self.space)
                self._take(index, plan, None)
                return
            problems += plan.problems or step.problems
        raise InputError(list(dict.fromkeys(problems)))

    def _ask_without_parts(self, candidate: Candidate) -> concurrent.futures.Future[Answer]:
        """The plan of one part of the batch as if it were the whole. A plan does not know what a loop over parts keeps inside."""
        overrides = [*candidate.overrides, "train.accumulate=1", f"train.batch={rows_at_once(candidate)}"]
        return self.plans.ask(self._question(overrides))

    def _rest(self) -> None:
        assert self._estimator is not None
        while True:
            # One more than there are workers, so that none of them waits for an older plan.
            while not self._is_late and len(self._pending) <= self.plans.workers:
                if (index := self._next()) is None:
                    break
                self._pending.append((index, self.ask(index), self._estimator.estimate(index)))
            if not self._pending:
                return
            concurrent.futures.wait([self._pending[0][1]], timeout=_POLL)
            self._take_ready()
            if self._is_late and self._pending:
                self.say(f"{self.seconds:g} s are over: {len(self._pending)} plans were not ready")
                return

    def _take_ready(self) -> None:
        """Takes plans in the order of their questions, so that a search whose plans are stored makes the same decisions again."""
        while self._pending and self._pending[0][1].done():
            index, plan, estimate = self._pending.popleft()
            self._take(index, plan.result(), estimate)
            # The next decision follows each plan, even if more are ready. Without time for another, all of them count.
            if not self._is_late:
                return

    @property
    def _is_late(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def _next(self) -> int | None:
        """The index of the layout to plan next; None if no other is worth it."""
        assert self._estimator is not None
        if self.begin is not None and self.begin not in self._asked:
            return self.begin
        seconds, best = self._estimator.seconds, self.best
        open_ones = np.flatnonzero(self._open() & self._may_fit())
        if not len(open_ones):
            return None
        open_ones = open_ones[np.argsort(seconds[open_ones], kind="stable")]
        found = int(open_ones[0])
        limit = seconds[found] if best is None else min(seconds[found], best.plan.seconds)
        known = {kind_of(one) for one in self._seen}
        # A kind that nobody has compiled may be better than its estimate, but not by any factor.
        for index in open_ones[seconds[open_ones] < _NEW * limit]:
            if kind_of(self.space[index]) not in known:
                return int(index)
        if best is None or len(self.ranked()) < self.top or seconds[found] * _GAIN < best.plan.seconds:
            return found
        return self._near(open_ones[seconds[open_ones] < _NEAR * best.plan.seconds], best)

    def _near(self, indices: npt.NDArray[np.intp], best: Try) -> int | None:
        """What to plan of layouts that should be a little slower than the best, the fastest first; None after enough of them."""
        # An estimate that is a little wrong may hide a better layout next to the best one.
        if (found := next((i for i in indices if num_changes(self.space[i], best.candidate) == 1), None)) is not None:
            return int(found)
        if self._extra >= _EXTRA * (len(self.tries) - self._extra):
            return None
        self._extra += 1
        # The forms with the fewest times are the most likely to surprise. A layout that did not fit has none.
        unusable = {one.candidate for one in self.tries if not one.plan.is_usable}
        planned = Counter(form_of(one) for one in self._seen if one not in unusable)
        return min(map(int, indices), key=lambda i: planned[form_of(self.space[i])], default=None)

    @property
    def _seen(self) -> list[Candidate]:
        """The layouts that have a plan, or will have."""
        return [*(one.candidate for one in self.tries), *(self.space[index] for index, _, _ in self._pending)]

    def _open(self) -> npt.NDArray[np.bool_]:
        """Whether each layout is still to be planned."""
        found = ~self._refused()
        found[list(self._asked)] = False
        return found

    def _refused(self) -> npt.NDArray[np.bool_]:
        """Whether each layout has a size of an axis with which none was accepted."""
        bad = {pair for pair, count in self._refusals.items() if count >= _REFUSED} - self._compiled
        return np.array([index not in self._asked and not bad.isdisjoint(one.mesh) for index, one in enumerate(self.space)])

    def _may_fit(self) -> npt.NDArray[np.bool_]:
        """Whether the estimate of each layout fits, with a margin."""
        assert self._estimator is not None
        memory = self._estimator.step.memory
        return np.ones(len(self.space), bool) if memory is None else self._estimator.peak_bytes <= _MARGIN * memory

    def ask(self, index: int) -> concurrent.futures.Future[Answer]:
        """Asks for the plan of a layout by its index."""
        self._asked.add(index)
        return self.plans.ask(self._question(self.space[index].overrides))

    def _question(self, overrides: Sequence[str]) -> Question:
        return replace(self.question, overrides=(*self.question.overrides, *overrides))

    def _take(self, index: int, plan: Answer, estimate: Estimate | None) -> None:
        assert self._estimator is not None
        candidate, best = self.space[index], self.best
        self.tries.append(Try(candidate=candidate, plan=plan, estimate=estimate))
        if plan.is_usable and (best is None or plan.seconds < _FASTER * best.plan.seconds):
            self._extra = 0
        # The dims of a model do not divide by every size. The space has only numbers of stages that its layers allow.
        sizes = [(axis, size) for axis, size in candidate.mesh if axis not in (*candidate.batch_axes, STAGE)]
        if plan.problems:
            self._refusals.update(sizes)
        else:
            self._compiled.update(sizes)
            self._estimator.learn(index, plan)
        self.say(f"[{time.monotonic() - self.started:4.0f} s] {len(self.tries):3}  {_outcome(plan):24} {layout_text(candidate)}")


def _outcome(plan: Answer) -> str:
    if plan.problems:
        return "refused"
    size = f"{plan.peak_bytes / 2**30:.0f} GiB"
    return f"{plan.seconds:.4g} s, {size}" if plan.fits else f"{size} do not fit"
