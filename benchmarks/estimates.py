"""How far the estimates of a search are from plans, for layouts that the search has not chosen. By plan, without a GPU.

    python benchmarks/estimates.py [--json] [--save] [--time 300] [--sample 16] [--slowest 2] [ROW ...]

The rows are the runs of runs.yaml, each without its layout. After a search, layouts are drawn at random among those that it has not
planned and that should fit into memory; with `--slowest 2`, among those that should also take at most twice as long as the best. They are
planned, and compared with the estimates that the search ended with. `benchmarks/search.py` compares the layouts that a search plans:
these are nearly equal, because it chose them.

    layouts     of the sample that compile and fit
    time, memory    mean relative errors of the estimates
    bias        mean of estimate / plan - 1, in time
    kendall     rank correlation of estimated and planned seconds (Kendall's tau)
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import make_parser, report, table
from benchmarks.search import RUNS, kendall, run_file
from jgt.hardware.chip import parse_target
from train.code.files import Code
from train.search.layout import layout_text
from train.search.plans import Plans, Question, plans_folder
from train.search.search import LayoutSearch
from train.search.space import Open, candidates
from train.search.step import Shape


def measure(name: str, run: Mapping[str, Any], seconds: float, count: int, slowest: float) -> dict[str, Any]:
    """The figures of a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(run_file(run["set"], has_layout=False))
        target, opened = parse_target(run["target"]), Open.read(str(path), [], Code())
        search = LayoutSearch(
            question=Question.on(target, str(path), [], []),
            target=target,
            space=candidates(opened, target.num_devices),
            plans=Plans(plans_folder()),
            seconds=seconds,
            top=6,
            model=Shape.of(opened.run.config.model),
            say=_say,
        )
        search.run()
        search.plans = Plans(plans_folder())
        try:
            pairs = _pairs(search, count, slowest)
        finally:
            search.plans.close()
    time, memory = ([guess[key] / plan[key] - 1 for guess, plan in pairs] for key in ("seconds", "peak_bytes"))
    return {
        "row": name,
        "layouts": len(pairs),
        "time": round(statistics.mean(map(abs, time)), 3),
        "memory": round(statistics.mean(map(abs, memory)), 3),
        "bias": round(statistics.mean(time), 3),
        "kendall": round(kendall(pairs), 2),
    }


def _pairs(search: LayoutSearch, count: int, slowest: float) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Estimate and plan of layouts that were drawn."""
    estimator, best = search.estimator, search.best
    assert estimator is not None and best is not None and estimator.step.memory is not None
    planned = {one.candidate for one in search.tries}
    fits = (estimator.peak_bytes <= estimator.step.memory) & (estimator.seconds <= slowest * best.plan.seconds)
    drawn = [int(i) for i in np.flatnonzero(fits) if search.space[int(i)] not in planned]
    asked = [(i, search.ask(i)) for i in random.Random(0).sample(drawn, min(count, len(drawn)))]
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    for index, future in asked:
        plan, estimate = future.result(), estimator.estimate(index)
        outcome = "refused" if plan.problems else f"{plan.seconds:.4g} s, {plan.peak_bytes / 1e9:.1f} GB"
        guessed = f"{estimate.seconds:.4g} s, {estimate.peak_bytes / 1e9:.1f} GB"
        _say(f"estimated {guessed}; planned {outcome}: {layout_text(search.space[index])}")
        if plan.is_usable:
            guess = {"seconds": estimate.seconds, "peak_bytes": estimate.peak_bytes}
            found.append((guess, {"seconds": plan.seconds, "peak_bytes": float(plan.peak_bytes)}))
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Searches and samples for each row of the command line, or for all, and reports."""
    runs = yaml.safe_load(RUNS.read_text())
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"runs (default: all): {', '.join(runs)}")
    parser.add_argument("--time", type=float, default=300, metavar="S", help="seconds of a search (300)")
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="layouts to draw (16)")
    parser.add_argument(
        "--slowest", type=float, default=math.inf, metavar="X", help="draw layouts that should take X times the best at most"
    )
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in runs]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {', '.join(runs)}")
    rows = [measure(name, runs[name], arguments.time, arguments.sample, arguments.slowest) for name in arguments.rows or runs]
    report("estimates", {"rows": rows}, arguments, table(rows))


if __name__ == "__main__":
    main()
