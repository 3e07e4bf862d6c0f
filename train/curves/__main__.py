"""The command lines of `jgt plot` and `jgt compare`. Neither needs JAX, so both answer at once, also on a laptop with a copied run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jgt.console import make_console
from jgt.document import InputError, nearest

from ..report.loads import MARGIN, Loads, describe_loads, read_loads
from .compare import compare_runs
from .runs import AXES, METRICS, RunCurves, read_runs, short_names
from .table import print_comparison
from .terminal import draw_text

PICTURE = "curves.png"
"""The file that `jgt plot` writes if none is named."""


_COLUMNS = 200
"""The columns of a heat map, at most."""


def plot(argv: Sequence[str] | None = None) -> int:
    """`jgt plot RUN [RUN ...]`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="jgt plot", description="Draws metrics of runs, as a PNG or in the terminal.", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, such as runs/quickstart")
    parser.add_argument("--metrics", metavar="A,B", help=f"the metrics to draw ({','.join(METRICS)})")
    parser.add_argument("--over", choices=list(AXES), default="steps", help="the horizontal axis (steps)")
    parser.add_argument("--output", metavar="FILE", help=f"the PNG to write ({PICTURE}); needs matplotlib")
    parser.add_argument("--experts", action="store_true", help="draw the load of each expert of one run instead of metrics")
    parser.add_argument("--terminal", action="store_true", help="draw in the terminal, as without matplotlib")
    return _answer(lambda: _plot(parser.parse_args(argv)))


def compare(argv: Sequence[str] | None = None) -> int:
    """`jgt compare A B`. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="jgt compare", description="Shows what two runs differ in: config, results, speed, memory and losses.", allow_abbrev=False
    )
    parser.add_argument("first", metavar="A", help="a run directory")
    parser.add_argument("second", metavar="B", help="another run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _answer(lambda: _compare(parser.parse_args(argv)))


def _plot(arguments: argparse.Namespace) -> None:
    runs = read_runs([Path(run) for run in arguments.runs])
    loads = _loads(arguments.runs) if arguments.experts else None
    metrics = _metrics(runs, arguments.metrics)
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if arguments.output and (arguments.terminal or not has_matplotlib):
        why = "--terminal writes no file" if arguments.terminal else "a PNG needs matplotlib: pip install 'jgt[plot]'"
        raise InputError(
            [f"command line: --output: {why}. Leave one of them out" if arguments.terminal else f"command line: --output: {why}"]
        )
    if arguments.terminal or not has_matplotlib:
        width = make_console().width if sys.stdout.isatty() else 80
        lines = draw_text(runs, metrics, arguments.over, width) if loads is None else describe_loads(loads, width - MARGIN)
        print("\n".join(lines))
        return
    from .plot import draw_loads, draw_png

    path = Path(arguments.output or PICTURE)
    if loads is None:
        draw_png(runs, metrics, arguments.over, path)
    else:
        draw_loads(loads.heat(_COLUMNS), (loads.steps[0], loads.steps[-1]), path)
    print(f"Drawn to {path}")


def _loads(runs: Sequence[str]) -> Loads:
    """The loads of the one run. Raises InputError if there are several, or if it has no experts."""
    if len(runs) > 1:
        raise InputError([f"command line: --experts: draws one run, not {len(runs)}. Name one"])
    loads = read_loads(Path(runs[0]))
    if loads is None:
        raise InputError([f"{runs[0]}: has no records of experts. --experts is for runs with model.experts"])
    return loads


def _metrics(runs: Sequence[RunCurves], names: str | None) -> list[str]:
    """The metrics to draw. Raises InputError for names that no run has."""
    known = list(dict.fromkeys(name for run in runs for name in run.metrics if name not in ("step", "time")))
    if names is None:
        return [name for name in (*METRICS, "samples_per_s") if name in known] or ["loss"]
    wanted = [name for name in names.split(",") if name]
    problems = [f"command line: --metrics: no run has {name!r}. {nearest(name, known)}" for name in wanted if name not in known]
    if problems or not wanted:
        raise InputError(problems or ["command line: --metrics: names no metric. Write them with commas, such as loss,eval_loss"])
    return wanted


def _compare(arguments: argparse.Namespace) -> None:
    runs = read_runs([Path(arguments.first), Path(arguments.second)])
    comparison = compare_runs(*runs)
    if arguments.json:
        print(json.dumps(comparison.to_json(), indent=1))
    else:
        print_comparison(comparison, short_names(runs))


def _answer(command: Callable[[], None]) -> int:
    try:
        command()
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(plot())
