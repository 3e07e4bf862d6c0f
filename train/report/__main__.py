"""The command line of the report. It imports neither JAX nor numpy, so that it answers at once."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jgt.command.parser import CommandParser
from jgt.document import InputError

from .accounts import Accounts, read_accounts
from .loads import read_loads

_END = "\n}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, with the garbage collector paused: millions of events are made, and none of them is garbage before the end."""
    arguments = parser().parse_args(argv)
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _report(Path(arguments.run), as_json=arguments.json)
    finally:
        if was_on:
            gc.enable()


def _report(run: Path, *, as_json: bool) -> int:
    """Prints the report. Exit code 2, with the reason on stderr, if RUN is not a run directory, has no events, or cannot be read."""
    try:
        accounts = replace(read_accounts(run), experts=read_loads(run))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    if as_json:
        print(_json_text(accounts))
    else:
        from .table import print_accounts

        print_accounts(accounts)
    return 0


def _json_text(accounts: Accounts) -> str:
    """The report as JSON, with a line for each start: Python's encoder is slow where it indents, and there may be many starts."""
    report = accounts.to_json()
    starts = ",\n  ".join(map(json.dumps, report.pop("starts")))
    return f'{json.dumps(report, indent=1).removesuffix(_END)},\n "starts": [\n  {starts}\n ]{_END}'


def parser() -> CommandParser:
    """The command line of the report."""
    parser = CommandParser("jgt report", "Shows where a run's wall time went, over all its starts, and the load of experts.")
    parser.add_argument("run", metavar="RUN", help="the run directory, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
