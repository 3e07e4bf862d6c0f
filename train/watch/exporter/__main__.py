"""The command line of `jgt metrics`, and the metrics of a run that trains, which its section `metrics:` asks for."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jgt import CommandParser
from jgt.document import InputError

from ...files.disk import replaced
from ...settings.command_line import seconds, whole_number
from ...settings.sections import MetricsConfig
from ..top.view import Watched
from .endpoint import PATH, RunSource, served, text_of


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt metrics RUN [RUN ...]`. Returns the exit code: 2 if a RUN is not a run directory or the port is taken, and stderr says why."""
    return parser().answer(argv, _metrics)


def parser() -> CommandParser:
    """The command line of `jgt metrics`."""
    made = CommandParser("jgt metrics", "Shows the numbers of runs as OpenMetrics text, for Prometheus: once, in a file, or at a port.")
    made.add_argument("runs", nargs="+", metavar="RUN", help="run directories, such as runs/quickstart")
    made.add_argument("--port", type=whole_number(0, 65_535), metavar="N", help="answer at this port until Ctrl-C; 0: any that is free")
    made.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen at (127.0.0.1: this machine alone)")
    made.add_argument("--output", metavar="FILE", help="replace this file, such as a .prom file that the node exporter reads, until Ctrl-C")
    made.add_argument("--every", type=seconds, default=15.0, metavar="SECONDS", help="the time between two replacements (15)")
    return made


def _metrics(arguments: argparse.Namespace) -> None:
    problems = list[str]()
    for run in arguments.runs:
        with InputError.collect(problems):
            Watched(Path(run))
    if problems:
        raise InputError(problems)
    sources = [RunSource(Path(run)) for run in arguments.runs]
    if arguments.port is None and arguments.output is None:
        print(text_of(sources), end="")
        return
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as closing:
        if arguments.port is not None:
            port = closing.enter_context(served(arguments.host, arguments.port, lambda: text_of(sources), "command line: --port"))
            print(f"http://{arguments.host}:{port}{PATH}. Ctrl-C ends it", flush=True)
        while True:
            if arguments.output is not None:
                _write(Path(arguments.output), text_of(sources))
            time.sleep(max(1.0, arguments.every))


def _write(path: Path, text: str) -> None:
    try:
        with replaced(path) as new:
            new.write_text(text)
    except OSError as error:
        raise InputError([f"{path}: cannot be written: {error.strerror or error}"]) from None


def endpoint(config: MetricsConfig, folder: Path, process: int | None, where: str) -> AbstractContextManager[int]:
    """The port of a process of a run, or of its launcher (None). where: the file and line of the key. Raises InputError if it is taken."""
    source = RunSource(folder, process)
    return served(config.host, config.port + (process or 0), lambda: text_of([source]), f"{where}: metrics.port")


if __name__ == "__main__":
    sys.exit(main())
