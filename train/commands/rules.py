"""The command `jgt rules`, which writes the rules of a run, or the layout that a program has already, as a rules file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jgt
from jgt.document import InputError

from ..config import load
from ..run.check import check_placement, rules_text
from ..settings.code.files import read_code
from ..settings.code.names import FAILURES, described, is_name, load_object
from ..settings.command_line import RunParser, whole_number

_WHERE = "command line"


def rules(argv: Sequence[str] | None = None) -> int:
    """`jgt rules FILE` or `MODULE:NAME`. Returns the exit code: 2 for a wrong run or a program without a layout, and stderr says why."""
    return rules_parser().answer(argv, _rules)


def rules_parser() -> RunParser:
    """The command line of `jgt rules`."""
    returns = "MODULE:NAME is a function without arguments that returns a function of JAX and its arguments, on their mesh"
    parser = RunParser("jgt rules", f"Writes the rules of a run, or the layout that a program has, as a rules file. {returns}.")
    parser.add_argument("--devices", type=whole_number(), metavar="N", help="use N virtual CPU devices instead of the ones that JAX finds")
    parser.add_argument("--write", metavar="FILE", help="the rules file to write, instead of printing it")
    return parser


def _rules(arguments: argparse.Namespace) -> None:
    # A shipped run is jgt:NAME.
    is_program = is_name(arguments.config) and not (arguments.config.startswith("jgt:") or Path(arguments.config).exists())
    text = _of_program(arguments, arguments.config) if is_program else _of_run(arguments)
    if arguments.write is None:
        print(text, end="")
    else:
        Path(arguments.write).write_text(text, encoding="utf-8")
        print(f"Wrote {arguments.write}")


def _of_run(arguments: argparse.Namespace) -> str:
    devices = [] if arguments.devices is None else [f"devices.virtual_cpu={arguments.devices}"]
    return rules_text(check_placement(load(arguments.config, [*arguments.overrides, *devices], code=arguments.code)))


def _of_program(arguments: argparse.Namespace, name: str) -> str:
    if arguments.devices is not None:
        jgt.use_virtual_cpu(arguments.devices)
    make = load_object(name, "MODULE:NAME", read_code(arguments.code), _WHERE)
    try:
        made = make()
    except FAILURES as error:
        raise InputError([f"{_WHERE}: {name} failed: {described(error)}"]) from error
    if not (isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) > 1 and callable(made[0])):
        raise InputError(
            [f"{_WHERE}: {name} returned a {type(made).__name__}. It must return a function and its arguments: (fn, params, x)"]
        )
    try:
        return str(jgt.rules_of(*made))
    except InputError:
        raise
    except FAILURES as error:
        raise InputError([f"{_WHERE}: {name}: the function failed: {described(error)}"]) from error
