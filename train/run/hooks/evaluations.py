"""The evaluations of a run so far: `checkpoint.best` keeps the checkpoint of the best one, `train.stop_early` ends a run by them.

Both follow from the rows of metrics.jsonl, and a row may be lost. So each checkpoint has the values of the metrics that decide, up to its
step. A start reads both, and adds its own evaluations. An evaluation of the step from which a start resumes that has no row, because a kill
came before it, is made again. So a run that was killed decides as one that never was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.document import InputError, nearest

from ...checkpoint.listing import Evaluated
from ...checkpoint.steps import open_steps
from ...config import Run
from ...journal.rows import read_metrics
from ...processes.processes import number_of_first_process
from ...records.clock import InFlight, steps_ahead
from ...step.state import Tree

_Sums = Mapping[str, tuple[jax.Array, jax.Array]]
"""The sum and the weight of each metric of an evaluation."""
EVENT = "event"
"""In a row of metrics.jsonl of what hooks have logged, which is not an evaluation: the event."""
_STORED = 1000
"""The number of newest evaluations that a checkpoint has, beside the best one."""


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
            is_finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
            self._costs[step] = self._sign * value if is_finite else math.inf

    def stored(self) -> tuple[tuple[int, float | None], ...]:
        """The steps and values that decide, for a checkpoint; None: not finite."""
        kept = {*sorted(self._costs)[-_STORED:], *(step for step in (self.best(),) if step is not None)}
        return tuple((step, self.value(step) if self._costs[step] < math.inf else None) for step in sorted(kept))

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

    def _read(self, last: int = 0, stored: Evaluated | None = None) -> None:
        stop, best = self._run.config.train.stop_early, self._run.config.checkpoint.best
        self._best = None if best is None else Metric(best)
        self._stop, self._patience = (None, 0) if stop is None else (Metric(stop.by), stop.patience)
        for row in _rows_of(self._folder) if last else ():
            if row["step"] <= last and not _is_of_training(row):
                self.add(row["step"], row)
        for metric in self._metrics:
            for step, value in (stored or {}).get(metric.name, ()):
                if step <= last:
                    metric.add(step, {metric.name: value})
        self.have_news = False

    @property
    def _metrics(self) -> list[Metric]:
        return [metric for metric in (self._best, self._stop) if metric is not None]

    def begin(self, step: int, stored: Evaluated | None = None) -> bool:
        """Reads the rows of a run that is at this step. stored: what its checkpoint has. Returns whether it ended early there.

        Raises OSError.
        """
        self._read(step, stored)
        return bool(number_of_first_process(int(self._ends)))

    def add(self, step: int, row: Mapping[str, object]) -> None:
        """Adds the metrics of a step, other than those of its training."""
        self.have_news = True
        for metric in self._metrics:
            metric.add(step, row)

    def stored(self) -> Evaluated:
        """The values that decide, by metric, for a checkpoint."""
        return {metric.name: metric.stored() for metric in self._metrics}

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


def made_at(folder: Path, step: int) -> tuple[bool, bool, dict[str, Any]]:
    """Whether a step has the row of its evaluation on held-out data, and that of the one on tasks, as the first process reads them.

    And the last row of training up to this step. Raises OSError.
    """
    held_out, last = list[bool](), dict[str, Any]()
    for row in _rows_of(folder):
        if _is_of_training(row):
            last = row if row["step"] <= step else last
        elif row["step"] == step and EVENT not in row:
            # Of an evaluation on held-out data, the loss is always one metric.
            held_out.append("eval_loss" in row)
    code = number_of_first_process(any(held_out) + 2 * (not all(held_out)))
    return bool(code % 2), code >= 2, last


def _rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else iter(())


def _is_of_training(row: Mapping[str, object]) -> bool:
    return "lr" in row


def held_out_means(
    step: jax.stages.Compiled, params: Tree, variables: Tree, batches: Mapping[str, Iterable[object]], mesh: Mesh | AbstractMesh
) -> dict[str, float]:
    """The evaluation of parameters, as the state has them, on held-out data: `eval_loss` and its like, and those of each part.

    step: the compiled evaluation. batches: the held-out batches by part of the data.
    """
    # Sums stay on the devices until the end; fetching each would make the devices wait for the host.
    sums, in_flight = list[tuple[str, _Sums]](), InFlight[_Sums](steps_ahead(mesh))
    for part, of_part in batches.items():
        for batch in of_part:
            sums.append((part, step(params, variables, batch)))
            in_flight.add(sums[-1][1])
    return _means(jax.device_get(sums))


def _means(sums: Sequence[tuple[str, _Sums]]) -> dict[str, float]:
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
