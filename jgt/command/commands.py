"""The command `jgt COMMAND`, and the commands by name.

A command is a module with a function `main(argv) -> int` and, for completion in a shell, `parser()`. Most belong to the trainer, which
`trainer.py` loads; jgt itself never imports it. Other packages add commands as entry points of the group `jgt.commands`. A module is
imported only when its command is used, because some import JAX.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from platform import python_version
from types import ModuleType

from jgt.command.parser import CommandParser
from jgt.command.trainer import trainer
from jgt.document import nearest, shown

GROUP = "jgt.commands"
_USAGE = "usage: jgt COMMAND [options]      jgt COMMAND --help shows the options of a command"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. purpose: one line for `jgt --help`. module: its full name, or that inside the trainer if it begins with a dot.

    function, make_parser: the names of the functions that run it and that make its parser. outlives_reader: it continues when the reader of
    its output has left, because the output is not what it is for.
    """

    purpose: str
    module: str
    function: str = "main"
    make_parser: str = "parser"
    outlives_reader: bool = False

    def load(self) -> ModuleType:
        """The command's module."""
        return trainer(self.module[1:]) if self.module.startswith(".") else importlib.import_module(self.module)

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command and returns its exit code."""
        return getattr(self.load(), self.function)(arguments)

    def parser(self) -> CommandParser | None:
        """The command's own parser, if it has one."""
        make = getattr(self.load(), self.make_parser, None)
        return None if make is None else make()


_RUN = "train the model of a run file, or resume its training"
_LAUNCH = "run a training on several processes of this machine, and restart them"
_OWN = {
    "train": Command(purpose=_RUN, module=".__main__", function="run_process", outlives_reader=True),
    "launch": Command(purpose=_LAUNCH, module=".launch.__main__", outlives_reader=True),
    "report": Command(purpose="show where a run's wall time went", module=".report.__main__"),
    "plot": Command(
        purpose="draw metrics of runs, as a PNG or in the terminal", module=".report.__main__", function="plot", make_parser="plot_parser"
    ),
    "compare": Command(purpose="show what two runs differ in", module=".report.__main__", function="compare", make_parser="compare_parser"),
    "check": Command(
        purpose="check the rules against the mesh and the shapes, without devices",
        module=".run.__main__",
        function="check",
        make_parser="check_parser",
    ),
    "verify": Command(
        purpose="show that the layout changes no number, on virtual devices",
        module=".run.__main__",
        function="verify",
        make_parser="verify_parser",
    ),
    "plan": Command(purpose="show what XLA does with the training step, also for GPUs that you do not have", module=".plan.__main__"),
    "inspect": Command(
        purpose="show which model a folder of Hugging Face describes",
        module=".run.__main__",
        function="inspect",
        make_parser="inspect_parser",
    ),
    "eval": Command(purpose="evaluate a model: on held-out data, on texts or on tasks", module=".commands.evaluate"),
    "export": Command(
        purpose="write the model of a run as a folder that transformers loads",
        module=".commands.published",
        function="export",
        make_parser="export_parser",
    ),
    "generate": Command(purpose="continue texts with the model of a run or a published one", module=".commands.generate"),
    "serve": Command(purpose="serve a model by the HTTP API of OpenAI, to try it", module=".serve.__main__", outlives_reader=True),
    "calibrate": Command(purpose="measure the devices of this machine, for the times of plans", module="jgt.planner.calibrate.__main__"),
    "schedule": Command(purpose="show and compare pipeline schedules", module="jgt.schedule.__main__"),
    "schema": Command(purpose="print the JSON Schema of run files or rules files, for editors", module=".config.schema"),
    "init": Command(purpose="write a project with a model of your own", module="jgt.command.project"),
    "completion": Command(purpose="print a script that completes commands and flags in a shell", module="jgt.command.completion"),
}


def find_command(name: str) -> Command | None:
    """The command of this name, if there is one."""
    # Reading the list of installed packages takes 60 ms, so it is read only for a name that is not jgt's own.
    return _OWN.get(name) or find_commands().get(name)


def find_commands() -> dict[str, Command]:
    """All commands, first jgt's own, which other packages cannot replace."""
    others = {
        entry.name: Command(purpose=f"of {entry.dist.name}" if entry.dist else entry.value, module=entry.module, function=entry.attr)
        for entry in entry_points(group=GROUP)
        if entry.name not in _OWN
    }
    return {**_OWN, **others}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the command's exit code, or 2 if there is no such command."""
    if argv is None:
        return _run_process(sys.argv[1:])
    arguments = list(argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        lines = [f"  {known:12} {command.purpose}" for known, command in find_commands().items()]
        print("\n".join([_USAGE, "", "commands:", *lines, "", "jgt --version shows the versions of jgt, JAX and Python."]))
        return 0
    if name == "--version":
        print(f"jgt {_version('jgt')} (jax {_version('jax')}, Python {python_version()})")
        return 0
    command = find_command(name)
    if command is None:
        wrong = f"there is no command {name!r}" if name else "a command is missing"
        print(f"jgt: {shown(wrong, quotes=False)}. {nearest(name, [*find_commands(), '--help', '--version'])}\n{_USAGE}", file=sys.stderr)
        return 2
    return command.run(arguments[1:])


def _run_process(arguments: Sequence[str]) -> int:
    """As `main`, for the process of one command: it ends quietly when the reader of its output leaves, as in `jgt check FILE | head`."""
    command = find_command(arguments[0]) if arguments else None
    if command is None or not command.outlives_reader:
        # Python ignores the signal, and would print a traceback instead.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = main(arguments)
        sys.stdout.flush()
    except OSError as error:
        # The error of a file names the file.
        if error.filename is not None:
            raise
        print(f"jgt: stdout cannot be written: {error.strerror or error}", file=sys.stderr)
        # Python would try again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return code


def _version(package: str) -> str:
    # Importing a package to ask it would take a second.
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
