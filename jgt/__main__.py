"""The command `jgt COMMAND`, the same as `python -m jgt COMMAND`."""

import sys

from jgt.command.commands import main

if __name__ == "__main__":
    sys.exit(main())
