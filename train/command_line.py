"""Reads the values of flags, writes lines on stderr, and names the exit codes of processes.

Everything here is needed before JAX may be imported, and by programs that never import it, such as the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from jgt import CommandParser
from jgt.document import InputError, read_bytes, shown


class Exit(enum.IntEnum):
    """Exit codes of `jgt train`. A process killed by a signal has 128 + the signal's number, as in a shell."""

    DONE = 0
    """All steps are done, or the run was asked to stop and its state is saved."""
    FAILED = 1
    """An error of this process."""
    INPUT = 2
    """The input is wrong; another try would end the same way."""
    HUNG = 3
    """No progress for too long."""
    PEER = 4
    """Another process of the run failed or is gone."""
    UNJOINED = 5
    """The processes of the run have not found each other."""
    LOST = 6
    """As DONE, but some of what the run writes about itself could not be written."""


class RunParser(CommandParser):
    """The parser of a command about a run, whose file is `config` and whose overrides are `overrides`.

    The file follows --config, or is the first argument without an equals sign. is_required: without a file, the process ends with code 2.
    """

    URL_FLAGS = ("--resume",)
    NOT_FLAGS = "Keys of the run's file are written without dashes, such as optimizer.lr=1e-3"

    def __init__(self, prog: str, description: str, *, is_required: bool = True):
        super().__init__(prog, description)
        self._is_required = is_required
        self.add_argument("--config", metavar="FILE", help="the run's YAML file, another way to give FILE")
        self.add_argument(
            "overrides",
            nargs="*",
            metavar="FILE key.sub=value",
            help="the run's YAML file, and values that replace the file's, such as train.steps=300",
        )
        code = "a Python file or folder whose code the run's file may name; repeatable"
        self.add_argument("--code", action="append", default=[], metavar="PATH", help=code)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of all arguments."""
        arguments = super().parse_args(args, namespace)
        file = next((argument for argument in arguments.overrides if "=" not in argument), None)
        if arguments.config is None and file is not None:
            arguments.config = file
            arguments.overrides.remove(file)
        if (arguments.config or "").endswith(".py"):
            self.error(f"{arguments.config} is Python, but a run's file is YAML. Give your own code with --code {arguments.config}")
        if arguments.config is None and self._is_required:
            self.error(f"a run's file is missing. Write {self.prog} run.yaml")
        return arguments


class EndError(Exception):
    """A failure that a run expects, such as a save that is impossible. The message says all. code: the exit code."""

    code = Exit.FAILED


class InUseError(EndError):
    """Another run is using this directory, or may be; the message names it."""


TOKEN = "JGT_TOKEN"
"""The variable with the token that all processes of a run share; see `train.processes.join`."""
LAUNCHED = "JGT_LAUNCHED"
"""The variable that the launcher sets for the processes that it starts."""
FEWER = "JGT_FEWER"
"""The variable that it sets with `--min-processes` below `--processes`: a start may have another number of processes than the last one."""

_MAX_NUMBER = 1_000_000_000
_MAX_SECONDS = 1_000_000
_MAX_TOKEN = 4_096
_JOIN_SECONDS, _LOCAL_JOIN_SECONDS = 300.0, 30.0


def add_model(parser: CommandParser, example: str) -> None:
    """Adds the arguments that name a model. example: an override that the command's users may want."""
    parser.takes_urls = True
    what = (
        "a run directory, one of the steps in its checkpoints, or a folder of Hugging Face, which may be a URL such as s3://BUCKET/FOLDER"
    )
    parser.add_argument("model", metavar="MODEL", help=what)
    keys = f"values that replace those of the run's file, such as mesh={{fsdp: 8}} or {example}"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help=keys)
    code = "a Python file or folder with the run's own code; repeatable"
    parser.add_argument("--code", action="append", default=[], metavar="PATH", help=code)


def whole_number(low: int = 1, high: int = _MAX_NUMBER) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`. It raises ArgumentTypeError."""

    def read(text: str) -> int:
        # The length first: Python refuses to read numbers of thousands of digits.
        if not text.isdecimal() or len(text) > 20 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high:,}, not {text[:40]!r}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """A time of at least 0 seconds, as an argparse type. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    # A comparison with NaN is false.
    if not 0 <= value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {_MAX_SECONDS:,}, not {text[:40]!r}")
    return value


def read_token(file: str | None) -> tuple[bytes, list[str]]:
    """The run's token, from a file or else from the environment, and the problems with it. Without either it is empty."""
    if file is None:
        return os.environ.get(TOKEN, "").strip().encode(errors="surrogateescape"), []
    try:
        token = read_bytes(Path(file), _MAX_TOKEN).strip()
    except InputError as error:
        return b"", [f"command line: --token-file: {problem}" for problem in error.problems]
    return token, [] if token else [f"command line: --token-file: {file}: is empty. Write a long random text into it"]


def join_seconds(given: float | None) -> float:
    """The seconds that the processes of a run wait for each other. given: the number in the config."""
    if given is not None:
        return given
    return _LOCAL_JOIN_SECONDS if LAUNCHED in os.environ else _JOIN_SECONDS


def may_have_fewer() -> bool:
    """Whether the launcher may have started this run with another number of processes than before."""
    return FEWER in os.environ


PATIENCE_SECONDS = 2.0
"""How long a stream may take for a record before training continues without it."""


class StandardStream:
    """stdout or stderr, which may delay a run only for a moment.

    A pipe without a reader blocks its writer for ever, so another thread does the writing. A stream that is an object of another program in
    this process, as in a notebook, cannot block, and knows by the thread of its writer to which cell the text belongs: it is written at
    once. find: the stream at this moment, because others may replace it.
    """

    def __init__(self, find: Callable[[], TextIO | None]):
        self._find = find
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, text: str) -> None:
        """Writes text. A character that the encoding lacks becomes its escape sequence.

        Raises OSError or ValueError, also if it takes longer than PATIENCE_SECONDS.
        """
        stream = self._find()
        if stream is None:
            return
        if not isinstance(stream, io.TextIOWrapper):
            _write_to(stream, text)
            return
        with self._lock:
            # While an earlier text still waits for the reader, this one is lost at once.
            if self._writer is None or not self._writer.is_alive():
                self._error = None
                # A daemon, because it may still wait for its reader when the run is over.
                self._writer = threading.Thread(target=self._write_in_thread, args=(stream, text), name="stream", daemon=True)
                try:
                    self._writer.start()
                except RuntimeError:
                    # The system allows no further thread. Most streams do not block.
                    self._writer = None
                    self._write_in_thread(stream, text)
                else:
                    self._writer.join(PATIENCE_SECONDS)
            # The text counts as lost from now on, although it still appears if the reader comes back.
            if self._writer is not None and self._writer.is_alive():
                raise TimeoutError("its reader has stopped reading")
            if self._error is not None:
                raise self._error

    def _write_in_thread(self, stream: TextIO, text: str) -> None:
        try:
            _write_to(stream, text)
        except (OSError, ValueError) as error:
            self._error = error


def _write_to(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    record = text.encode(encoding, "backslashreplace")
    # A notebook's stream has a descriptor too, which leads to the terminal of its server.
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):
            descriptor = stream.fileno()
            # First what others have left in Python's buffer. The text itself does not go through it: what failed would stay there, and be
            # written again.
            stream.flush()
            write_all(descriptor, record)
            return
    stream.write(record.decode(encoding))
    stream.flush()


def say(text: str, *, who: str = "jgt") -> None:
    """Prints a line for a person on stderr, if it works."""
    say_lines([f"{who}: {text}"])


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines on stderr, if it works. Control characters, which a terminal would obey, become escapes."""
    parts = [shown(part, sys.maxsize, quotes=False) for line in lines for part in line.split("\n")]
    with contextlib.suppress(OSError, ValueError):
        _STDERR.write("".join(f"{part}\n" for part in parts))


def settle_streams() -> None:
    """Drops what stdout and stderr still hold if it cannot be written: Python would try again at its exit, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def write_all(descriptor: int, record: bytes) -> None:
    """Writes all bytes, in as many pieces as the system likes. Raises OSError."""
    left = memoryview(record)
    while left:
        left = left[os.write(descriptor, left) :]


_STDERR = StandardStream(lambda: sys.stderr)
