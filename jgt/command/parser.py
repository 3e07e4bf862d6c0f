"""A parser of flags that reports mistakes as jgt does for a file: all unknown flags at once, each with the nearest name.

argparse answers a misspelt flag with five lines of usage that do not contain the right one, and it reports a missing flag before the
misspelt one that should have been it. So flags are compared with the known ones before argparse reads anything. Flags and other arguments
may alternate, and a flag cannot be abbreviated: an abbreviation would change its meaning when a flag is added.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from jgt.document import InputError, nearest, shown
from jgt.document.files import url_problem
from jgt.document.problems import most_similar

_MAX_LINE = 2_000


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, such as `jgt plan`. Wrong arguments end the process with exit code 2."""

    NOT_FLAGS: ClassVar[str] = ""
    """The end of a message about an unknown flag, which says what else may be meant."""
    URL_FLAGS: ClassVar[tuple[str, ...]] = ()
    """Flags whose values may be URLs. The command itself refuses those that it cannot use."""
    takes_urls = False
    """Whether arguments that are not flags may be URLs. The command itself refuses those that it cannot use."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of all arguments."""
        arguments = list(sys.argv[1:] if args is None else args)
        if problems := self._flag_problems(arguments):
            self.exit(2, "".join(f"command line: {shown(problem, _MAX_LINE, quotes=False)}\n" for problem in problems))
        # Without this form of it, argparse refuses arguments behind a flag.
        parsed, rest = self.parse_known_intermixed_args(arguments, namespace)
        if rest:
            self.error(f"{' '.join(map(shown, rest))} cannot be given here{f'. Write {self.usage}' if self.usage else ''}")
        return parsed

    def answer(self, args: Sequence[str] | None, command: Callable[[argparse.Namespace], object]) -> int:
        """Calls the command with the values of all arguments. Returns the exit code: 2 for an InputError, 1 for an OSError, otherwise 0."""
        arguments = self.parse_args(args)
        try:
            command(arguments)
        except InputError as error:
            print("\n".join(error.problems), file=sys.stderr)
            return 2
        except OSError as error:
            # stdout has no name, and `jgt.command.commands` answers for it.
            if error.filename is None:
                raise
            print(f"{error.filename}: {error.strerror or error}", file=sys.stderr)
            return 1
        return 0

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends the process."""
        # argparse names a flag as "argument --flag", and types as Python does.
        text = re.sub(r"^argument (?=-)", "", message).replace("invalid int value:", "must be a whole number, not")
        self.exit(2, f"command line: {shown(text, _MAX_LINE, quotes=False)}. `{self.prog} --help` lists all flags\n")

    def arguments(self) -> list[argparse.Action]:
        """All flags and other arguments."""
        return list(self._actions)

    def flags(self) -> list[str]:
        """All flags in their long form, without --help and those that only jgt itself gives."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [flag for action in shown for flag in action.option_strings if flag.startswith("--") and flag != "--help"]

    def _flag_problems(self, arguments: list[str]) -> list[str]:
        # Arguments behind `--` are not flags.
        given = arguments[: arguments.index("--")] if "--" in arguments else arguments
        problems: list[str] = []
        for before, argument in zip(("", *given), given, strict=False):
            flag, _, value = argument.partition("=")
            path = value if argument.startswith("--") else "" if self.takes_urls else argument
            takes_it = (flag if argument.startswith("--") else before) in self.URL_FLAGS
            if not takes_it and (problem := url_problem(path)):
                problems.append(problem)
            if not argument.startswith("--") or flag in self._option_string_actions:
                continue
            if re.fullmatch(r"--\w+(\.\w+)+", flag):
                problems.append(f"{flag}: is not a flag. An override of the run's file has no dashes: {flag[2:]}=VALUE")
            else:
                # The dashes that all flags share are left out of the comparison.
                close = most_similar(flag[2:], [known[2:] for known in (*self.flags(), "--help")])
                near = f"Did you mean '--{close}'?" if close else f"{nearest('', self.flags())} {self.NOT_FLAGS}"
                problems.append(f"{flag}: unknown flag. {near}".rstrip())
        return problems
