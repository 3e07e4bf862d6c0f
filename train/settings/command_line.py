"""The values of flags, and the variables that a launcher sets.

Everything here is needed before JAX may be imported, and by programs that never import it, such as the launcher.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jgt import CommandParser
from jgt.document import InputError, read_bytes


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
