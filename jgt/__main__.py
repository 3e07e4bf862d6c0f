"""The command `jgt COMMAND`, the same as `python -m jgt COMMAND`.

Commands are entry points of the group `jgt.commands`: the trainer adds its own without jgt importing the trainer, and so may
any other package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from jgt.document import nearest

USAGE = "usage: jgt COMMAND [options]      jgt COMMAND --help shows the options of a command"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the command's exit code, or 2 if there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    commands = {entry.name: entry for entry in entry_points(group="jgt.commands")}
    if name in ("-h", "--help"):
        print(f"{USAGE}\n\ncommands: {', '.join(sorted(commands))}\n\nTo train: python -m train --config FILE")
        return 0
    if name not in commands:
        wrong = f"there is no command {name!r}" if name else "a command is missing"
        print(f"jgt: {wrong}. {nearest(name, sorted(commands))}\n{USAGE}", file=sys.stderr)
        return 2
    # Only the chosen command is imported: others import JAX.
    return commands[name].load()(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
