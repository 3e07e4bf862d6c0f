"""The command line of `jgt top`: a screen that is drawn once a second, or one frame for a file or a pipe.

It needs no JAX and writes nothing but requests (`train.journal.status`), so it runs anywhere the run directory can be read. Of a run in a
bucket it has a copy of the files that it reads, of which it updates what has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import select
import shutil
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jgt import CommandParser, Console
from jgt.document import InputError, read

from ...files.bucket import Bucket, is_url
from ...files.mirror import fetch_records
from ...journal.members import number
from ...journal.status import ask
from ...settings.command_line import seconds
from .frame import Line, draw_frame, plain
from .view import UPDATE_SECONDS, Watched

_LANES = 16
_READ = re.compile(r"config\.yaml|metrics\.jsonl|(events|status)(-[a-z0-9]+)?\.jsonl?|profile/signals\.json")
"""The files of a run in a bucket that are copied."""


def main(argv: Sequence[str] | None = None) -> int:
    """`jgt top RUN [RUN ...]`. Returns the exit code: 2 if a RUN is not a run directory, and stderr says why."""
    return parser().answer(argv, _top)


def parser() -> CommandParser:
    """The command line of `jgt top`."""
    parser = CommandParser("jgt top", "Shows what the processes of a run do at this moment, the worst first.")
    parser.takes_urls = True
    what = "run directories, such as runs/quickstart, copies of them, or URLs of runs in buckets"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=what)
    parser.add_argument("--once", action="store_true", help="print one frame and stop, as into a file or a pipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run and stop")
    parser.add_argument("--every", type=seconds, default=1.0, metavar="SECONDS", help="the time between two frames (1)")
    return parser


def _top(arguments: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        runs, problems = list[Watched](), list[str]()
        for run in arguments.runs:
            with InputError.collect(problems):
                runs.append(_in_bucket(run, stack) if is_url(run) else Watched(Path(run)))
        if problems:
            raise InputError(problems)
        _show(runs, arguments)


def _in_bucket(url: str, stack: contextlib.ExitStack) -> Watched:
    """A run in a bucket. Its copy is removed when the stack is closed."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), url.rstrip("/").rpartition("/")[2])
    bucket, known = Bucket(url), dict[str, bytes]()

    def update() -> None:
        fetch_records(bucket, folder, _READ.fullmatch, known)

    try:
        update()
    except OSError as error:
        raise InputError([f"{error.filename}: cannot be read: {error.strerror or error}"]) from None
    copied = number(read(folder / "config.yaml").find("run.copy_seconds").plain()) or 0.0
    return Watched(folder, update, copied + 2 * UPDATE_SECONDS)


def _show(runs: Sequence[Watched], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for run in runs:
            print(json.dumps(run.read().to_json()))
    elif arguments.once or not sys.stdout.isatty():
        # COLUMNS and LINES say how large the frame of a pipe is.
        columns, lines = shutil.get_terminal_size((80, 24))
        frame = _frame(runs, columns, lines)
        if sys.stdout.isatty():
            Console().print(Console.styled(frame), soft_wrap=True)
        else:
            print(plain(frame))
    else:
        with contextlib.suppress(KeyboardInterrupt), _keys() as read_key:
            _watch(runs, max(0.1, arguments.every), read_key)


def _frame(runs: Sequence[Watched], width: int, height: int, said: str = "") -> list[Line]:
    """The frame of all runs, one below the other."""
    each = max(4, height // len(runs))
    return [line for run in runs for line in draw_frame(run.read(lanes=_LANES if width >= 120 else 0), width, each, said)][:height]


def _watch(runs: Sequence[Watched], every: float, read_key: Callable[[float], str]) -> None:
    console, frame, said, is_paused = Console(), list[Line](), "", False
    with console.screen(hide_cursor=True) as screen:
        while True:
            if not is_paused:
                frame = _frame(runs, console.width, console.height, said)
                screen.update(Console.styled(frame))
            key, said = read_key(every), ""
            if key == "q":
                return
            if key == " ":
                is_paused = not is_paused
            elif key in _REQUESTS:
                said = "; ".join(_ask(run, _REQUESTS[key]) for run in runs)


_REQUESTS = {"s": "save", "p": "profile"}


def _ask(run: Watched, what: str) -> str:
    name = run.folder.name
    if run.update is not None:
        return f"{name}: a bucket takes no requests. Ask on the machine of the run"
    try:
        ask(run.folder, what)
    except OSError as error:
        return f"{name}: the request cannot be written: {error.strerror or error}"
    return f"{name}: asked for a {what}"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that returns the key that is pressed within some seconds, or nothing. Without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def read(seconds: float) -> str:
        return sys.stdin.read(1) if select.select([keyboard], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(keyboard)
        yield read
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
