"""The estimates of a search, compared with plans of layouts that the search has not chosen. By plan, without a GPU.

    python benchmarks/estimates.py [--json] [--save] [ROW ...]                      from the plans in benchmarks/layouts, in seconds
    python benchmarks/estimates.py --plan [--time 300] [--sample 32] [ROW ...]      makes these plans first, for minutes

The rows are the runs of runs.yaml, each without its layout. After a search, layouts are drawn at random among those that it has not
planned and that should fit into memory, half of them among those that should also take at most twice as long as the best. They are
planned, and compared with the estimates, to which the plans of the search give the scale. `benchmarks/search.py` compares the layouts that
a search plans: these are nearly equal, because it chose them.

    layouts     the number of layouts of the sample that compile and fit
    time, memory    mean relative errors of the estimates
    bias        mean of estimate / plan - 1, in time
    kendall     rank correlation of estimated and planned seconds (Kendall's tau)
    near        whether the row has only layouts whose plan takes at most twice as long as the best
    top_5, top_14   the best plan of the first 5 and 14 layouts that fit, in the order of their estimates, over the best of all
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, make_parser, report, table
from benchmarks.search import RUNS, kendall, run_file
from jgt.planner.hardware.target import Target
from train.plan.make import answer
from train.plan.search.estimate import Estimate, Estimator, Step
from train.plan.search.layout import Candidate
from train.plan.search.plans import PlanFigures, Plans, RunFile, plans_folder
from train.plan.search.search import LayoutSearch
from train.plan.search.space import OpenLayout

LAYOUTS = ROOT / "benchmarks" / "layouts"
_NEAR = 2.0
_STORED = ("seconds", "peak_bytes", "fits", "exposed", "parts")
"""What is stored of a plan."""
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A layout of a space by its index, its plan, and whether it was drawn at random."""

    index: int
    plan: PlanFigures
    is_drawn: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The plans of a search and of layouts drawn at random, for one model.

    space: their layouts. found: the plans, in the order in which the search took them.
    """

    row: str
    space: Sequence[Candidate]
    step: Step
    target: Target
    found: Sequence[Planned]

    def estimator(self) -> Estimator:
        """The estimates that the search had at its end."""
        found = Estimator(self.step, self.target, self.space)
        for one in self.found:
            if not one.is_drawn:
                found.learn(one.index, one.plan)
        return found

    def drawn(self, *, near: bool) -> list[Planned]:
        """The layouts drawn at random whose step fits. near: only those that take at most twice as long as the best."""
        usable = [one for one in self.found if one.plan.is_usable]
        limit = _NEAR * min(one.plan.seconds for one in usable)
        return [one for one in usable if one.is_drawn and (not near or one.plan.seconds <= limit)]

    def figures(self, estimator: Estimator, *, near: bool) -> dict[str, float]:
        """The errors of the estimates, and the order that they give."""
        pairs = [(_figures(estimator.estimate(one.index)), _figures(one.plan)) for one in self.drawn(near=near)]
        time, memory = ([guess[key] / plan[key] - 1 for guess, plan in pairs] for key in ("seconds", "peak_bytes"))
        return {
            "layouts": len(pairs),
            "time": round(statistics.mean(map(abs, time)), 4),
            "memory": round(statistics.mean(map(abs, memory)), 4),
            "bias": round(statistics.mean(time), 4),
            "kendall": round(kendall(pairs), 3),
            **{f"top_{count}": round(self.regret(estimator, count), 3) for count in (5, 14)},
        }

    def regret(self, estimator: Estimator, count: int) -> float:
        """The best plan of the first layouts that fit, in the order of their estimates, over the best plan of all."""
        usable = sorted((one for one in self.found if one.plan.is_usable), key=lambda one: estimator.seconds[one.index])
        first, best = (min(one.plan.seconds for one in some) for some in (usable[:count], usable))
        return first / best


def _figures(one: Estimate | PlanFigures) -> dict[str, float]:
    return {"seconds": one.seconds, "peak_bytes": float(one.peak_bytes)}


def read_sample(row: str, run: Mapping[str, Any]) -> Sample:
    """The plans of a row that are stored in benchmarks/layouts. Layouts that a search no longer offers are left out."""
    head, *lines = [json.loads(line) for line in sample_file(row).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        search = _search(_write_run(folder, run), run["target"], 0)
    offered = {json.dumps(one.overrides): one for one in search.space}
    lines = [line for line in lines if json.dumps(line["layout"]) in offered]
    # An estimate does not depend on other layouts of the space.
    space = [offered[json.dumps(line["layout"])] for line in lines]
    found = [Planned(index=i, plan=PlanFigures.of_json(line["plan"]), is_drawn=line["drawn"]) for i, line in enumerate(lines)]
    return Sample(row=row, space=space, step=Step(**head), target=search.target, found=found)


def plan_sample(row: str, run: Mapping[str, Any], seconds: float, count: int) -> None:
    """Searches, draws layouts at random, plans them and stores all plans."""
    with tempfile.TemporaryDirectory() as folder:
        search = _search(_write_run(folder, run), run["target"], seconds)
        search.run()
        estimator = search.estimator
        assert estimator is not None
        tries = [one for one in search.tries if not one.plan.problems]
        lines = [json.dumps(asdict(estimator.step)), *(_line(one.candidate, one.plan, is_drawn=False) for one in tries)]
        # A search closes its plans.
        search.plans = Plans(answer, plans_folder())
        try:
            asked = [(i, search.ask(i)) for i in _draw(search, estimator, count)]
            for index, future in asked:
                plan, estimate, candidate = future.result(), estimator.estimate(index), search.space[index]
                outcome = "refused" if plan.problems else f"{plan.seconds:.4g} s, {plan.peak_bytes / 1e9:.1f} GB"
                _say(f"{estimate.seconds:.4g} s, {estimate.peak_bytes / 1e9:.1f} GB; planned {outcome}: {candidate.text}")
                lines += [] if plan.problems else [_line(candidate, plan, is_drawn=True)]
        finally:
            search.plans.close()
    LAYOUTS.mkdir(exist_ok=True)
    sample_file(row).write_text("".join(f"{line}\n" for line in lines))


def sample_file(row: str) -> Path:
    """Where the plans of a row are stored."""
    return LAYOUTS / f"{row}.jsonl"


def _write_run(folder: str, run: Mapping[str, Any]) -> Path:
    path = Path(folder) / "run.yaml"
    path.write_text(run_file(run["set"], has_layout=False))
    return path


def _search(path: Path, where: str, seconds: float) -> LayoutSearch:
    opened, plans = OpenLayout.read(RunFile(config=str(path))), Plans(answer, plans_folder())
    return LayoutSearch(opened=opened, target=Target.parse(where), plans=plans, seconds=seconds, top=6, say=_say)


def _draw(search: LayoutSearch, estimator: Estimator, count: int) -> list[int]:
    """Layouts by their indices: half of them near the best, the rest anywhere."""
    assert search.best is not None
    planned = {one.candidate for one in search.tries}
    fits = np.flatnonzero(estimator.peak_bytes <= search.target.usable_bytes)
    open_ones = [int(i) for i in fits if search.space[int(i)] not in planned]
    near = [i for i in open_ones if estimator.seconds[i] <= _NEAR * search.best.plan.seconds]
    chance = random.Random(0)
    found = chance.sample(near, min(count // 2, len(near)))
    others = [i for i in open_ones if i not in set(found)]
    return found + chance.sample(others, min(count - len(found), len(others)))


def _line(candidate: Candidate, plan: PlanFigures, *, is_drawn: bool) -> str:
    values = {name: _rounded(getattr(plan, name)) for name in _STORED}
    return json.dumps({"layout": candidate.overrides, "drawn": is_drawn, "plan": values})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in cast("dict[str, Any]", value).items() if one}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Reports on each row of the command line, or on all that have plans."""
    runs = yaml.safe_load(RUNS.read_text())
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"runs (default: all with plans): {', '.join(runs)}")
    parser.add_argument("--plan", action="store_true", help="search, draw and plan first")
    parser.add_argument("--time", type=float, default=300, metavar="S", help="seconds of a search (300)")
    parser.add_argument("--sample", type=int, default=32, metavar="N", help="layouts to draw (32)")
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in runs]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {', '.join(runs)}")
    names = arguments.rows or [name for name in runs if sample_file(name).exists()]
    if arguments.plan:
        for name in names:
            plan_sample(name, runs[name], arguments.time, arguments.sample)
    rows: list[dict[str, Any]] = []
    for name in names:
        sample = read_sample(name, runs[name])
        estimator = sample.estimator()
        for near in (False, True):
            rows.append({"row": name, "near": near, **sample.figures(estimator, near=near)})
    report("estimates", {"rows": rows}, arguments, [*table(rows), *_means(rows)])


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The mean figures over the models, a line each for all and for near layouts."""
    lines: list[str] = []
    for near in (False, True):
        some = [row for row in rows if row["near"] == near and row["layouts"] > 1]
        if some:
            names = ("time", "memory", "kendall", "top_5", "top_14")
            means = ", ".join(f"{name} {statistics.mean(row[name] for row in some):.3f}" for name in names)
            lines.append(f"mean of {len(some)} models, {'near' if near else 'all'} layouts: {means}")
    return lines


if __name__ == "__main__":
    main()
