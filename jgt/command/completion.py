"""The command `jgt completion SHELL`: a script that lets a shell complete commands, flags and files, written by shtab.

bash, zsh and fish also complete the keys of a run's file, with which overrides begin: `jgt train run.yaml train.st` becomes `train.steps=`.

The script contains all names, because a shell that asked jgt at each tab would wait for Python to start. So it is as old as the jgt that
wrote it. A line in the shell's startup file, `source <(jgt completion bash)`, renews it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import shtab

from jgt.command.commands import find_commands
from jgt.command.parser import CommandParser

_OVERRIDES = "overrides"
"""The name of the argument that takes keys of a run's file."""
# Keys are offered where no file matches: most words begin both. No blank follows an equals sign; fish knows that itself.
_ZSH = "_jgt_words() { _files || compadd -S '' -- KEYS; }"
_FISH = """function _jgt_words
  set -l files (__fish_complete_path (commandline -ct))
  printf '%s\\n' $files
  test -n "$files"; or printf '%s\\n' KEYS
end"""
_BASH = """
_jgt() {
  _shtab_jgt
  [[ ${#COMPREPLY[@]} = 0 && " COMMANDS " == *" ${COMP_WORDS[1]} "* ]] || return 0
  COMPREPLY=($(compgen -W "KEYS" -- "${COMP_WORDS[COMP_CWORD]}"))
  compopt +o filenames -o nospace 2>/dev/null || :
}
complete -o bashdefault -F _jgt jgt"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script."""
    arguments = parser().parse_args(argv)
    keys, takers = " ".join(f"{key}=" for key in dict.fromkeys(_keys(find_commands()["schema"].load().schemas()["run"]))), list[str]()
    # In zsh, shtab completes only the first of several arguments.
    print(shtab.complete(_all_commands(takers, keys), arguments.shell).replace('"(*)::', '"*:'))
    if arguments.shell == "bash":
        print(_BASH.replace("COMMANDS", " ".join(takers)).replace("KEYS", keys))
    return 0


def parser() -> CommandParser:
    """The command line of the completion."""
    parser = CommandParser("jgt completion", "Prints a script that lets a shell complete commands and flags of jgt.")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="for example in ~/.bashrc: source <(jgt completion bash)")
    return parser


def _keys(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a JSON Schema that have no keys below them."""
    for key, value in schema.get("properties", {}).items():
        if key != "extends":
            yield from list(_keys(value, f"{prefix}{key}.")) or [f"{prefix}{key}"]
    for one in (*schema.get("anyOf", ()), *(schema[name] for name in ("then", "else") if name in schema)):
        yield from _keys(one, prefix)


def _all_commands(takers: list[str], keys: str) -> argparse.ArgumentParser:
    """A parser with each command as a subparser, which is what shtab reads. takers: gets the commands that take `keys`."""
    preamble = {"zsh": _ZSH.replace("KEYS", keys), "fish": _FISH.replace("KEYS", keys)}
    words: Any = {**shtab.FILE, "zsh": "_jgt_words", "fish": "(_jgt_words)", "preamble": preamble}
    root = argparse.ArgumentParser(prog="jgt", description="Shards JAX programs by name.")
    root.add_argument("--version", action="version", version="", help="show the versions of jgt, JAX and Python")
    commands = root.add_subparsers(metavar="COMMAND")
    for name, command in find_commands().items():
        own = command.parser()
        for action in [] if own is None else own.arguments():
            takers += [name] if action.dest == _OVERRIDES else []
            # Files, where there is nothing else to offer.
            if action.choices is None and action.nargs != 0:
                setattr(action, "complete", words if action.dest == _OVERRIDES else shtab.FILE)  # noqa: B010
        commands.add_parser(name, help=command.purpose, description=command.purpose, parents=[own] if own else [], add_help=own is None)
    return root


if __name__ == "__main__":
    sys.exit(main())
