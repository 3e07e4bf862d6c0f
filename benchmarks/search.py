"""Layouts that a search finds, compared with the layouts of published runs. By plan, without a GPU.

    python benchmarks/search.py [--json] [--save] [--time 300] [ROW ...]

The rows are the runs of runs.yaml. Each search gets the model, the batch and the target of a run, and nothing of its layout: mesh, rules,
pipeline, recompute and accumulation are open. Both steps are plans of the real program, so the ratio says what the search gains by jgt's
own model of the hardware.

    published   predicted seconds of a step with the published layout, and whether it fits
    found       the same for the best layout that the search has found
    ratio       found / published: the regret if it is above 1
    planned     layouts that were planned, of all
    time, memory   mean relative errors of the estimates, made before their plans, of layouts that fit
    kendall     rank correlation of estimated and planned seconds (Kendall's tau) of the same layouts
    wall_s, peak_mb   of the search with its workers' CPU-seconds in cpu_s

The cache of plans is not used, unless `--cached` asks for it.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, make_parser, report, run_process, table
from train.plan.search.space import LAYOUT

RUNS = Path(__file__).with_name("runs.yaml")
_LIMIT_S = 3600


def run_file(settings: Mapping[str, Any], *, has_layout: bool) -> str:
    """A run's file, as text, with the settings of a published run. Its paths are relative to `configs`, as in runs.yaml."""
    document = dict(settings)
    if not has_layout:
        document = {name: value for name, value in document.items() if name not in LAYOUT}
        document["train"] = {name: value for name, value in document["train"].items() if f"train.{name}" not in LAYOUT}
    if isinstance(document.get("rules"), str):
        document["rules"] = str((ROOT / "configs" / document["rules"]).resolve())
    return yaml.safe_dump(document, sort_keys=False)


def measure(name: str, run: Mapping[str, Any], seconds: float, *, cached: bool) -> dict[str, Any]:
    """The figures of a row. Raises FailedError if the search finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        command = [sys.executable, "-m", "jgt", "plan", "--config", str(path), "--target", run["target"], "--json"]
        path.write_text(run_file(run["set"], has_layout=True))
        own = run_process(command, limit_s=_LIMIT_S).found
        path.write_text(run_file(run["set"], has_layout=False))
        search = ["--search", "--time", f"{seconds:g}", *([] if cached else ["--no-cache"])]
        sample = run_process([*command, *search], limit_s=_LIMIT_S)
    found = sample.found
    best = found["best"][0]["plan"]["seconds"]
    published = own["step_time_ms"] / 1e3
    fits = "" if own["memory"]["fits"] else ", does not fit"
    return {
        "row": name,
        "published": f"{published:.3g}{fits}",
        "found": round(best, 4),
        "ratio": round(best / published, 3),
        "layout": found["best"][0]["layout"],
        "planned": f"{len(found['best']) + len(found['others'])} of {found['layouts']}",
        **errors(found["best"]),
        "wall_s": round(sample.s, 1),
        "cpu_s": round(sample.cpu_s, 1),
        "peak_mb": None if sample.peak_mb is None else round(sample.peak_mb),
    }


def errors(best: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The errors of the estimates of layouts, and the order that they gave."""
    pairs = [(one["estimate"], one["plan"]) for one in best if one["estimate"] is not None]
    if len(pairs) < 2:
        return {"time": None, "memory": None, "kendall": None}
    time, memory = ([abs(guess[key] / plan[key] - 1) for guess, plan in pairs] for key in ("seconds", "peak_bytes"))
    return {"time": round(statistics.mean(time), 3), "memory": round(statistics.mean(memory), 3), "kendall": round(kendall(pairs), 2)}


def kendall(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float:
    """Kendall's tau of two rankings of layouts, by estimates and by plans: 1 if they are the same, -1 if one is the reverse."""
    signs = [
        (a["seconds"] - c["seconds"]) * (b["seconds"] - d["seconds"])
        for (a, b), (c, d) in itertools.combinations(pairs, 2)
        if b["seconds"] != d["seconds"]
    ]
    return statistics.mean((sign > 0) - (sign < 0) for sign in signs) if signs else 1.0


def main() -> None:
    """Searches for each row of the command line, or for all, and reports."""
    runs = yaml.safe_load(RUNS.read_text())
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"runs to search for (default: all): {', '.join(runs)}")
    parser.add_argument("--time", type=float, default=300, metavar="S", help="seconds of a search (300)")
    parser.add_argument("--cached", action="store_true", help="use plans of earlier searches, and keep these")
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in runs]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {', '.join(runs)}")
    rows: list[dict[str, Any]] = []
    for name in arguments.rows or runs:
        try:
            rows.append(measure(name, runs[name], arguments.time, cached=arguments.cached))
        except FailedError as error:
            sys.exit(f"{name}: {error}")
        # A search takes minutes.
        print(f"{name}: {rows[-1]['found']} s, ratio {rows[-1]['ratio']}", file=sys.stderr, flush=True)
    ratios = [row["ratio"] for row in rows]
    ratio = {"median": statistics.median(ratios), "max": max(ratios)}
    lines = [*table(rows), f"ratio: median {ratio['median']:.3f}, largest {ratio['max']:.3f}"]
    report("search", {"seconds": arguments.time, "rows": rows, "ratio": ratio}, arguments, lines)


if __name__ == "__main__":
    main()
