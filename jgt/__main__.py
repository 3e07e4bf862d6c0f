"""The command `jgt COMMAND`, the same as `python -m jgt COMMAND`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from jgt import __version__
from jgt.command.commands import find_command, find_commands
from jgt.document import nearest, shown

USAGE = "usage: jgt COMMAND [options]      jgt COMMAND --help shows the options of a command"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the command's exit code, or 2 if there is no such command."""
    if argv is None:
        return _run_process(sys.argv[1:])
    arguments = list(argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        lines = [f"  {known:12} {command.purpose}" for known, command in find_commands().items()]
        print("\n".join([USAGE, "", "commands:", *lines, "", "jgt --version shows the versions of jgt, JAX and Python."]))
        return 0
    if name == "--version":
        print(f"jgt {__version__} (jax {_version('jax')}, Python {python_version()})")
        return 0
    command = find_command(name)
    if command is None:
        wrong = f"there is no command {name!r}" if name else "a command is missing"
        print(f"jgt: {shown(wrong, quotes=False)}. {nearest(name, [*find_commands(), '--help', '--version'])}\n{USAGE}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main())
