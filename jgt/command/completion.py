"""The command `jgt completion SHELL`: a script that lets a shell complete commands, flags and files, written by shtab.

The script contains all names, because a shell that asked jgt at each tab would wait for Python to start. So it is as old as the jgt that
wrote it. A line in the shell's startup file, `source <(jgt completion bash)`, renews it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import shtab

from jgt.command.commands import find_commands
from jgt.command.parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script."""
    arguments = parser().parse_args(argv)
    print(shtab.complete(_all_commands(), arguments.shell))
    return 0


def parser() -> CommandParser:
    """The command line of the completion."""
    parser = CommandParser("jgt completion", "Prints a script that lets a shell complete commands and flags of jgt.")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="for example in ~/.bashrc: source <(jgt completion bash)")
    return parser


def _all_commands() -> argparse.ArgumentParser:
    """A parser with each command as a subparser, which is what shtab reads."""
    root = argparse.ArgumentParser(prog="jgt", description="Shards JAX programs by name.")
    root.add_argument("--version", action="version", version="", help="show the versions of jgt, JAX and Python")
    commands = root.add_subparsers(metavar="COMMAND")
    for name, command in find_commands().items():
        own = command.parser()
        for action in [] if own is None else own.arguments():
            # Files, where there is nothing else to offer.
            if action.choices is None and action.nargs != 0:
                setattr(action, "complete", shtab.FILE)  # noqa: B010
        commands.add_parser(name, help=command.purpose, description=command.purpose, parents=[own] if own else [], add_help=own is None)
    return root


if __name__ == "__main__":
    sys.exit(main())
