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
    """A command. purpose: one line for `jgt --help`. outlives_reader: it continues when the reader of its output has left.

    place: `module:function`, as an entry point has it; the function is `main` if it is left out. A module that begins with a dot is inside
    the trainer. The parser of a function `NAME` is `NAME_parser` or, if the module has none, `parser`.
    in_process: the function in the place of that one, where the process ends with the command.
    """

    purpose: str
    place: str
    in_process: str = ""
    outlives_reader: bool = False

    @property
    def name(self) -> str:
        """The name of the function that runs it."""
        return self.place.partition(":")[2] or "main"

    def load(self) -> ModuleType:
        """The command's module."""
        module = self.place.partition(":")[0]
        return trainer(module[1:]) if module.startswith(".") else importlib.import_module(module)

    def run(self, arguments: Sequence[str], *, owns_process: bool = False) -> int:
        """Runs the command and returns its exit code. owns_process: whether the process ends with it."""
        return getattr(self.load(), self.in_process if owns_process and self.in_process else self.name)(arguments)

    def parser(self) -> CommandParser | None:
        """The command's own parser, if it has one."""
        module = self.load()
        make = getattr(module, f"{self.name}_parser", getattr(module, "parser", None))
        return None if make is None else make()


_RUN = "train the model of a run file, or resume its training"
_LAUNCH = "run a training on several processes of this machine, and restart them"
GROUPS = {
    "Train": {
        "init": Command(purpose="write a project with a model of your own", place="jgt.command.project"),
        "train": Command(purpose=_RUN, place=".__main__", in_process="run_process", outlives_reader=True),
        "launch": Command(purpose=_LAUNCH, place=".launch.__main__", outlives_reader=True),
        "doctor": Command(purpose="examine this machine and its devices before a run", place=".doctor.__main__"),
    },
    "Watch": {
        "top": Command(purpose="watch the processes of a run", place=".watch.top.__main__"),
        "metrics": Command(purpose="show the numbers of runs to Prometheus", place=".watch.exporter.__main__"),
        "report": Command(purpose="show where a run's wall time went", place=".watch.__main__"),
        "trace": Command(purpose="write the whole of a run as a timeline, for Perfetto", place=".watch.__main__:trace"),
        "plot": Command(purpose="draw metrics of runs, as a PNG or in the terminal", place=".watch.__main__:plot"),
        "compare": Command(purpose="show what two runs differ in", place=".watch.__main__:compare"),
    },
    "Layout": {
        "check": Command(purpose="check the rules against the mesh and the shapes, without devices", place=".run.__main__:check"),
        "rules": Command(purpose="write the rules of a run, or of a program with a layout, as a file", place=".commands.rules:rules"),
        "verify": Command(purpose="show that the layout changes no number, on virtual devices", place=".run.__main__:verify"),
        "conformance": Command(purpose="search JAX for programs that it computes wrongly over devices", place="jgt.conformance.__main__"),
    },
    "Plan": {
        "plan": Command(purpose="show what XLA does with the training step, also for GPUs that you do not have", place=".plan.__main__"),
        "calibrate": Command(purpose="measure the devices of this machine, for the times of plans", place=".plan.calibrate.__main__"),
        "schedule": Command(purpose="show and compare pipeline schedules", place="jgt.schedule.__main__"),
    },
    "Models": {
        "inspect": Command(purpose="show which model a folder of Hugging Face describes", place=".run.__main__:inspect"),
        "generate": Command(purpose="continue texts with the model of a run or a published one", place=".commands.generate"),
        "serve": Command(purpose="serve a model by OpenAI's HTTP API, to try it", place=".commands.serve.__main__", outlives_reader=True),
        "eval": Command(purpose="evaluate a model: on held-out data, on texts or on tasks", place=".commands.evaluate"),
        "export": Command(purpose="write the model of a run as a folder that transformers loads", place=".commands.published:export"),
    },
    "Shell and editor": {
        "schema": Command(purpose="print the JSON Schema of run files or rules files, for editors", place=".config.schema"),
        "completion": Command(purpose="print a script that completes commands and flags in a shell", place="jgt.command.completion"),
    },
}
"""The commands by what people want."""
_OWN = {name: command for group in GROUPS.values() for name, command in group.items()}


def find_command(name: str) -> Command | None:
    """The command of this name, if there is one."""
    # Reading the list of installed packages takes 60 ms, so it is read only for a name that is not jgt's own.
    return _OWN.get(name) or find_commands().get(name)


def find_commands() -> dict[str, Command]:
    """All commands, first jgt's own, which other packages cannot replace."""
    others = {
        entry.name: Command(purpose=f"of {entry.dist.name}" if entry.dist else entry.value, place=entry.value)
        for entry in entry_points(group=GROUP)
        if entry.name not in _OWN
    }
    return {**_OWN, **others}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the command's exit code, or 2 if there is no such command."""
    return _run_process(sys.argv[1:]) if argv is None else _run(list(argv), owns_process=False)


def _run(arguments: Sequence[str], *, owns_process: bool) -> int:
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        others = {name: command for name, command in find_commands().items() if name not in _OWN}
        lines = [_USAGE]
        for group, commands in {**GROUPS, "Of other packages": others}.items():
            lines += ["", f"{group}:", *(f"  {known:12} {command.purpose}" for known, command in commands.items())] if commands else []
        print("\n".join([*lines, "", "jgt --version shows the versions of jgt, JAX and Python."]))
        return 0
    if name == "--version":
        print(f"jgt {_version('jgt')} (jax {_version('jax')}, Python {python_version()})")
        return 0
    command = find_command(name)
    if command is None:
        wrong = shown(f"there is no command {name!r}", quotes=False)
        print(f"jgt: {wrong}. {nearest(name, [*find_commands(), '--help', '--version'])}\n{_USAGE}", file=sys.stderr)
        return 2
    return command.run(arguments[1:], owns_process=owns_process)


def _run_process(arguments: Sequence[str]) -> int:
    """As `main`, for the process of one command: it ends quietly when the reader of its output leaves, as in `jgt check FILE | head`."""
    command = find_command(arguments[0]) if arguments else None
    if command is None or not command.outlives_reader:
        # Python ignores the signal, and would print a traceback instead.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = _run(arguments, owns_process=True)
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
