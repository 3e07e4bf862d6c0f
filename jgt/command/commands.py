"""The commands of `jgt`, by name.

A command is a module with a function `main(argv) -> int` and, for completion in a shell, `parser()`. Most belong to the trainer, which
`jgt.trainer` loads; jgt itself never imports it. Other packages add commands as entry points of the group `jgt.commands`. A module is
imported only when its command is used, because some import JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

from jgt.command.parser import CommandParser
from jgt.trainer import trainer

GROUP = "jgt.commands"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. purpose: one line for `jgt --help`. load: imports its module. function: the name of the function that runs it.

    outlives_reader: it continues when the reader of its output has left, because the output is not what it is for.
    """

    purpose: str
    load: Callable[[], ModuleType]
    function: str = "main"
    outlives_reader: bool = False

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command and returns its exit code."""
        return getattr(self.load(), self.function)(arguments)

    def parser(self) -> CommandParser | None:
        """The command's own parser, if it has one."""
        make = getattr(self.load(), "parser", None)
        return None if make is None else make()


def _of_trainer(module: str, purpose: str, function: str = "main", *, outlives_reader: bool = False) -> Command:
    return Command(purpose=purpose, load=lambda: trainer(module), function=function, outlives_reader=outlives_reader)


def _of_jgt(module: str, purpose: str) -> Command:
    return Command(purpose=purpose, load=lambda: importlib.import_module(module))


_OWN = {
    "train": _of_trainer("__main__", "train the model of a run file, or resume its training", "run_process", outlives_reader=True),
    "launch": _of_trainer("launch.__main__", "run a training on several processes of this machine, and restart them", outlives_reader=True),
    "report": _of_trainer("report.__main__", "show where a run's wall time went"),
    "plot": _of_trainer("curves.__main__", "draw metrics of runs, as a PNG or in the terminal", "plot"),
    "compare": _of_trainer("curves.__main__", "show what two runs differ in", "compare"),
    "check": _of_trainer("check.__main__", "check the rules against the mesh and the shapes, without devices"),
    "verify": _of_trainer("verify.__main__", "show that the layout changes no number, on virtual devices"),
    "plan": _of_trainer("plan.__main__", "show what XLA does with the training step, also for GPUs that you do not have"),
    "calibrate": _of_trainer("calibrate.__main__", "measure the devices of this machine, for the times of plans"),
    "schedule": _of_jgt("jgt.schedule.__main__", "show and compare pipeline schedules"),
    "schema": _of_trainer("schema.__main__", "print the JSON Schema of run files or rules files, for editors"),
    "init": _of_jgt("jgt.command.project", "write a project with a model of your own"),
    "completion": _of_jgt("jgt.command.completion", "print a script that completes commands and flags in a shell"),
}


def find_command(name: str) -> Command | None:
    """The command of this name, if there is one."""
    # Other packages are looked for only if they could have it: reading the list of what is installed takes 60 ms.
    return _OWN.get(name) or find_commands().get(name)


def find_commands() -> dict[str, Command]:
    """All commands, those of other packages last. A name of jgt's own cannot be replaced."""
    others = {
        entry.name: Command(purpose=f"of {entry.dist.name}" if entry.dist else entry.value, load=_loader(entry.module), function=entry.attr)
        for entry in entry_points(group=GROUP)
        if entry.name not in _OWN
    }
    return {**_OWN, **others}


def _loader(module: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(module)
