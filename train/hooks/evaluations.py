"""The evaluations of a run so far: `checkpoint.best` keeps the checkpoint of the best one, `train.stop_early` ends a run by them.

Both follow from the rows of metrics.jsonl alone. A start reads the rows up to its first step, and adds those of its own evaluations. So a
run that was killed decides as one that never was, and a checkpoint needs no further state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jgt.document import InputError, nearest

from ..checkpoint.steps import open_steps
from ..config import Run
from ..processes.processes import number_of_first_process
from ..records.clock import InFlight, steps_ahead
from ..report.rows import read_metrics


class Metric:
    """A metric of evaluations by step. name: the lower it is, the better; with a minus in front, the higher."""

    def __init__(self, name: str):
        self.name, self._sign = name.removeprefix("-"), -1.0 if name.startswith("-") else 1.0
        self._costs: dict[int, float] = {}

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds the metric of a step, if the row has it."""
        if self.name in row:
            value = row[self.name]
            # The best value is finite. None: it was not, when it was written.
            is_finite = isinstance(value, int | float) and math.isfinite(value)
            self._costs[step] = self._sign * value if is_finite else math.inf

    def best(self, steps: Iterable[int] | None = None) -> int | None:
        """The best step, of these or of all; of equal ones the first. None if none of them is known."""
        known = dict(self._costs)
        finite = [step for step in (known if steps is None else steps) if known.get(step, math.inf) < math.inf]
        return min(finite, key=lambda step: (known[step], step), default=None)

    def value(self, step: int) -> float:
        """The metric of a step."""
        return self._sign * self._costs[step]

    @property
    def since(self) -> int:
        """The number of evaluations after the best one."""
        best = self.best() or 0
        return sum(step > best for step in self._costs)


class Evaluations:
    """Decides by a run's evaluations which step is the best, and whether the run ends early.

    All processes make the same calls, and get the first one's decisions.
    """

    def __init__(self, run: Run):
        self._run, self._folder = run, run.config.run.path
        self.have_news = False
        """Whether `verdict` was not asked since rows were added."""
        self._read()

    def _read(self, last: int = 0) -> None:
        stop, best = self._run.config.train.stop_early, self._run.config.checkpoint.best
        self._best = None if best is None else Metric(best)
        self._stop, self._patience = (None, 0) if stop is None else (Metric(stop.by), stop.patience)
        self._known: set[int] = set()
        path = self._folder / "metrics.jsonl"
        for row in read_metrics(path) if last and path.is_file() else ():
            # A row of training has a learning rate.
            if row["step"] <= last and "lr" not in row:
                self.add(row["step"], row)
        self.have_news = False

    def begin(self, step: int) -> bool:
        """Reads the rows of a run that is at this step. Returns whether it ended early there. Raises OSError."""
        self._read(step)
        return bool(number_of_first_process(int(self._ends)))

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds the metrics of a step, other than those of its training."""
        self.have_news = True
        self._known.add(step)
        for metric in filter(None, (self._best, self._stop)):
            metric.add(step, row)

    def check(self, names: Iterable[str]) -> None:
        """Raises InputError if evaluations on held-out data have these metrics, and so none of them ever has one that is asked for."""
        config, known, problems = self._run.config, list(names), list[str]()
        # Tasks, and hooks at other steps, log metrics when their time comes.
        if config.eval.tasks or any(hook.every is not None for hook in config.hooks.values()):
            return
        for key, metric in (("checkpoint.best", self._best), ("train.stop_early.by", self._stop)):
            if metric is not None and metric.name not in known:
                have = f"Evaluations have {', '.join(known)}" if known else "The data holds nothing out, so there are no evaluations"
                why = f"no evaluation has the metric {metric.name!r}. {nearest(metric.name, known, lists=False)} {have}"
                problems.append(" ".join(f"{self._run.where(key)}: {key}: {why}".split()))
        if problems:
            raise InputError(problems)

    def lack(self, step: int) -> bool:
        """Whether a kill came between the save of this step and its evaluation."""
        return bool(number_of_first_process(int(step > 0 and step not in self._known)))

    def verdict(self, step: int) -> tuple[bool, bool]:
        """Whether this step is the best so far, and whether the run ends here."""
        self.have_news = False
        is_best = self._best is not None and self._best.best() == step
        code = number_of_first_process(is_best + 2 * self._ends)
        return bool(code % 2), code >= 2

    @property
    def _ends(self) -> bool:
        return self._stop is not None and self._stop.since >= self._patience

    def held(self) -> set[int]:
        """The best of the steps that have a checkpoint, which must stay. Called by another thread of the first process."""
        return set() if self._best is None or (step := self._best_saved()) is None else {step}

    def _best_saved(self) -> int | None:
        return None if self._best is None else self._best.best(open_steps(self._run.config.run.checkpoints).listed())

    def describe_end(self, step: int, last: int) -> str:
        """The line about a run that ended early."""
        assert self._stop is not None
        best, count = self._stop.best(), self._patience
        was = "was never finite" if best is None else f"was best at step {best} ({self._stop.value(best):.6g})"
        since = f"and not better in {count} evaluation{'s' if count > 1 else ''} since"
        return f"Ended early at step {step} of {last} by train.stop_early: {self._stop.name} {was} {since}"

    def describe_best(self) -> str | None:
        """The line about the checkpoint of the best step."""
        step = self._best_saved()
        if self._best is None or step is None:
            return None
        return f"Best checkpoint: {self._run.config.run.checkpoints}/{step}, with {self._best.name} {self._best.value(step):.6g}"


def open_evaluations(run: Run, names: Callable[[], Iterable[str]]) -> Evaluations | None:
    """The evaluations of a run; None if nothing follows from them. names(): the metrics of its evaluations on held-out data.

    Raises InputError for a metric that no evaluation has. What hooks return is known only at the first evaluation.
    """
    if run.config.train.stop_early is None and run.config.checkpoint.best is None:
        return None
    evaluations = Evaluations(run)
    if not run.config.hooks:
        evaluations.check(names())
    return evaluations


def held_out_means(step: Any, params: Any, variables: Any, batches: Mapping[str, Iterable[Any]], mesh: Any) -> dict[str, float]:
    """The evaluation of parameters, as the state has them, on held-out data: `eval_loss` and its like, and those of each part.

    step: the compiled evaluation. batches: the held-out batches by part of the data.
    """
    # Sums stay on the devices until the end; fetching each would make the devices wait for the host.
    sums, in_flight = list[tuple[str, Any]](), InFlight(steps_ahead(mesh))
    for part, of_part in batches.items():
        for batch in of_part:
            sums.append((part, step(params, variables, batch)))
            in_flight.add(sums[-1][1])
    return _means(jax.device_get(sums))


def _means(sums: Sequence[tuple[str, Mapping[str, tuple[Any, Any]]]]) -> dict[str, float]:
    """The means of an evaluation, from part, sum and weight of each batch: over all parts and, if there are several, over each of them."""
    totals: dict[str, list[float]] = {}
    has_parts = len({part for part, _ in sums}) > 1
    for part, metrics in sums:
        for name, (total, weight) in metrics.items():
            for key in (f"eval_{name}", *((f"eval_{name}/{part}",) if has_parts else ())):
                so_far = totals.setdefault(key, [0.0, 0.0])
                so_far[0] += float(total)
                so_far[1] += float(weight)
    return {key: total / weight for key, (total, weight) in totals.items()}
