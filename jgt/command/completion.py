"""The command `jgt completion SHELL`: a script that lets a shell complete commands, flags and files.

The script is written from the parsers of the commands. It contains all names, because a shell that asked jgt at each tab would wait for
Python to start. So it is as old as the jgt that wrote it. A line in the shell's startup file, `source <(jgt completion bash)`, renews it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jgt.command.commands import find_commands
from jgt.command.parser import CommandParser


@dataclass(frozen=True, kw_only=True)
class Words:
    """What may follow a command. flags: their help, by name. choices: the values of its first argument, if it has fixed ones."""

    purpose: str
    flags: Mapping[str, str]
    choices: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script."""
    arguments = parser().parse_args(argv)
    print("\n".join(SHELLS[arguments.shell](_words())))
    return 0


def parser() -> CommandParser:
    """The command line of the completion."""
    parser = CommandParser("jgt completion", "Prints a script that lets a shell complete commands and flags of jgt.")
    parser.add_argument("shell", choices=[*SHELLS], help="for example in ~/.bashrc: source <(jgt completion bash)")
    return parser


def _words() -> dict[str, Words]:
    return {name: _words_of(command.purpose, command.parser()) for name, command in find_commands().items()}


def _words_of(purpose: str, parser: CommandParser | None) -> Words:
    actions: list[argparse.Action] = [] if parser is None else parser.arguments()
    flags = {flag: _one_line(action.help) for action in actions for flag in action.option_strings if flag.startswith("--")}
    choices = next((tuple(action.choices) for action in actions if not action.option_strings and action.choices), ())
    return Words(purpose=_one_line(purpose), flags=flags, choices=choices)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _bash(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "_jgt() {"
    yield "  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} flags= choices="
    yield "  COMPREPLY=()"
    yield f'  ((COMP_CWORD == 1)) && COMPREPLY=($(compgen -W {_quoted(" ".join([*commands, "--help", "--version"]))} -- "$word")) && return'
    # What follows `--` belongs to the processes that the launcher starts.
    yield '  [[ $command == launch && " ${COMP_WORDS[*]:0:COMP_CWORD} " == *" -- "* ]] && command=train'
    yield "  case $command in"
    for name, words in commands.items():
        yield f"    {name}) flags={_quoted(' '.join(words.flags))} choices={_quoted(' '.join(words.choices))} ;;"
    yield "  esac"
    yield '  if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$word"))'
    yield '  elif [[ -n $choices ]]; then COMPREPLY=($(compgen -W "$choices" -- "$word")); fi'
    yield "}"
    # default: files, where there is nothing else to offer.
    yield "complete -o default -F _jgt jgt"


def _zsh(commands: Mapping[str, Words]) -> Iterator[str]:
    yield "#compdef jgt"
    yield "_jgt() {"
    yield "  local command=$words[2]"
    yield "  local -a described choices"
    yield "  if (( CURRENT == 2 )); then"
    yield f"    described=({' '.join(_described(name, words.purpose) for name, words in commands.items())})"
    yield "    _describe command described; return"
    yield "  fi"
    yield "  [[ $command == launch && ${words[(I)--]} -gt 0 && ${words[(I)--]} -lt $CURRENT ]] && command=train"
    yield "  case $command in"
    for name, words in commands.items():
        flags = " ".join(_described(flag, text) for flag, text in words.flags.items())
        yield f"    {name}) described=({flags}); choices=({' '.join(words.choices)}) ;;"
    yield "  esac"
    yield "  if [[ $PREFIX == -* ]]; then _describe flag described"
    yield "  elif (( $#choices )); then compadd -a choices"
    yield "  else _files; fi"
    yield "}"
    yield "compdef _jgt jgt"


def _fish(commands: Mapping[str, Words]) -> Iterator[str]:
    for name, words in commands.items():
        yield f"complete -c jgt -n __fish_use_subcommand -f -a {name} -d {_quoted(words.purpose)}"
        seen = _quoted(f"__fish_seen_subcommand_from {name}")
        for flag, text in words.flags.items():
            yield f"complete -c jgt -n {seen} -l {flag.removeprefix('--')} -d {_quoted(text)}"
        if words.choices:
            yield f"complete -c jgt -n {seen} -f -a {_quoted(' '.join(words.choices))}"


def _described(name: str, text: str) -> str:
    # zsh's _describe separates a name from its description by a colon.
    return _quoted(f"{name}:{text}")


def _quoted(text: str) -> str:
    """The text in single quotes, which all three shells read in the same way."""
    # Between the quotes, bash takes a backslash literally and fish does not; a double quote is literal in all of them.
    return "'" + text.replace("\\", "/").replace("'", '"') + "'"


SHELLS: Mapping[str, Callable[[Mapping[str, Words]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""Writes the lines of a shell's script, by the name of the shell."""

if __name__ == "__main__":
    sys.exit(main())
