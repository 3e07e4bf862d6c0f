"""The command lines of `jgt report`, `jgt plot`, `jgt compare` and `jgt trace`. They need no JAX, so they answer at once."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jgt import CommandParser, Console
from jgt.document import InputError, nearest

from ..files.bucket import is_url
from ..files.mirror import local_copies
from ..journal.accounts import read_accounts
from ..journal.loads import Loads, read_loads
from .compare import compare_runs, print_comparison
from .heat_map import MARGIN, describe_loads
from .runs import AXES, METRICS, RunCurves, draw_text, read_runs, short_names
from .table import print_accounts
from .trace import write_trace

TIMELINE = "run.trace.json.gz"
"""The file that `jgt trace` writes if none is named."""
PICTURE = "curves.png"
"""The file that `jgt plot` writes if none is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt report RUN`. Returns the exit code: 2 if RUN is not a run directory, has no events, or cannot be read, and stderr says why."""
    return parser().answer(argv, _report)


def plot(argv: Sequence[str] | None = None) -> int:
    """`jgt plot RUN [RUN ...]`. Returns the exit code."""
    return plot_parser().answer(argv, _plot)


def compare(argv: Sequence[str] | None = None) -> int:
    """`jgt compare A B`. Returns the exit code."""
    return compare_parser().answer(argv, _compare)


def trace(argv: Sequence[str] | None = None) -> int:
    """`jgt trace RUN`. Returns the exit code."""
    return trace_parser().answer(argv, _trace)


def parser() -> CommandParser:
    """The command line of `jgt report`."""
    parser = _of_runs("jgt report", "Shows where a run's wall time went, over all its starts, and the load of experts.", run="RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def plot_parser() -> CommandParser:
    """The command line of `jgt plot`."""
    parser = _of_runs("jgt plot", "Draws metrics of runs, as a PNG or in the terminal.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, such as runs/quickstart, or URLs of runs in buckets")
    parser.add_argument("--metrics", metavar="A,B", help=f"the metrics to draw ({','.join(METRICS)})")
    parser.add_argument("--over", choices=list(AXES), default="steps", help="the horizontal axis (steps)")
    parser.add_argument("--output", metavar="FILE", help=f"the PNG to write ({PICTURE}); needs matplotlib")
    parser.add_argument("--experts", action="store_true", help="draw the load of each expert of one run instead of metrics")
    parser.add_argument("--terminal", action="store_true", help="draw in the terminal, as without matplotlib")
    return parser


def compare_parser() -> CommandParser:
    """The command line of `jgt compare`."""
    parser = _of_runs("jgt compare", "Shows what two runs differ in: config, results, speed, memory and losses.", first="A", second="B")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def trace_parser() -> CommandParser:
    """The command line of `jgt trace`."""
    parser = _of_runs("jgt trace", "Writes the whole of a run as a timeline, for ui.perfetto.dev or chrome://tracing.", run="RUN")
    parser.add_argument(
        "--output", metavar="FILE", help=f"the file to write ({TIMELINE}, or step-N.trace.json.gz); compressed if it ends in .gz"
    )
    parser.add_argument("--last", type=_duration, metavar="TIME", help="only the last part of the run, such as 30m, 12h or 2d")
    parser.add_argument(
        "--step", type=int, metavar="N", help="only the profile that has step N, by signal, beside the schedule of a pipeline"
    )
    return parser


def _of_runs(name: str, purpose: str, **runs: str) -> CommandParser:
    """A command line about runs. runs: the arguments that name one, each with the word for it in the help."""
    parser = CommandParser(name, purpose)
    parser.takes_urls = True
    for argument, word in runs.items():
        parser.add_argument(argument, metavar=word, help="a run directory, such as runs/quickstart, or the URL of a run in a bucket")
    return parser


def _duration(text: str) -> float:
    """Seconds of a text such as `90s`, `30m`, `12h` or `2d`. Raises ArgumentTypeError."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or len(text) > 8 or int(text[:-1]) < 1:
        raise argparse.ArgumentTypeError(f"must be a number and s, m, h or d, such as 30m, not {text[:40]!r}")
    return float(int(text[:-1]) * unit)


def _trace(arguments: argparse.Namespace) -> None:
    path = Path(arguments.output or (TIMELINE if arguments.step is None else f"step-{arguments.step}.trace.json.gz"))
    with local_copies([arguments.run]) as (run,):
        count = write_trace(run, path, arguments.last, arguments.step)
    print(f"Wrote {count:,} events to {path}. Open it at ui.perfetto.dev or chrome://tracing")


def _report(arguments: argparse.Namespace) -> None:
    try:
        with local_copies([arguments.run]) as (run,):
            accounts = replace(read_accounts(run), run=arguments.run, experts=read_loads(run))
    except OSError as error:
        raise InputError([f"{error.filename}: cannot be read: {error.strerror or error}"]) from None
    if arguments.json:
        print(json.dumps(accounts.to_json(), indent=1))
    else:
        print_accounts(accounts)


def _plot(arguments: argparse.Namespace) -> None:
    if is_url(arguments.output):
        raise InputError([f"command line: --output: {arguments.output}: is a URL. Name a file"])
    with local_copies(arguments.runs) as folders:
        runs = read_runs(folders)
        loads = _loads(folders) if arguments.experts else None
    metrics = _metrics(runs, arguments.metrics)
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if arguments.output and arguments.terminal:
        raise InputError(["command line: --output: --terminal writes no file. Leave one of them out"])
    if arguments.output and not has_matplotlib:
        raise InputError(["command line: --output: a PNG needs matplotlib: pip install 'jgt[plot]'"])
    if arguments.terminal or not has_matplotlib:
        width = Console().width if sys.stdout.isatty() else 80
        lines = draw_text(runs, metrics, arguments.over, width) if loads is None else describe_loads(loads, width - MARGIN)
        print("\n".join(lines))
        return
    from .plot import draw_loads, draw_png

    path = Path(arguments.output or PICTURE)
    if loads is None:
        draw_png(runs, metrics, arguments.over, path)
    else:
        draw_loads(loads, path)
    print(f"Drawn to {path}")


def _loads(runs: Sequence[Path]) -> Loads:
    """The loads of the one run. Raises InputError if there are several, or if it has no experts."""
    if len(runs) > 1:
        raise InputError([f"command line: --experts: draws one run, not {len(runs)}. Name one"])
    loads = read_loads(runs[0])
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
    with local_copies([arguments.first, arguments.second]) as folders:
        runs = read_runs(folders)
    comparison = compare_runs(*runs)
    if arguments.json:
        print(json.dumps(asdict(comparison), indent=1))
    else:
        print_comparison(comparison, short_names(runs))


if __name__ == "__main__":
    sys.exit(main())
