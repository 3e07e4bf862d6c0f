"""The commands of `jgt`, by name.

A command is a module with a function `main(argv) -> int` and, for completion in a shell, `parser()`. Most belong to the trainer, which
`trainer.py` loads; jgt itself never imports it. Other packages add commands as entry points of the group `jgt.commands`. A module is
imported only when its command is used, because some import JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

from jgt.command.parser import CommandParser
from jgt.command.trainer import trainer

GROUP = "jgt.commands"


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
    "calibrate": Command(purpose="measure the devices of this machine, for the times of plans", module="jgt.calibrate.__main__"),
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
