"""The command line of the report. It imports neither JAX nor numpy, so that it answers at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jgt.command.parser import CommandParser
from jgt.document import InputError

from .accounts import read_accounts
from .loads import read_loads
from .table import print_accounts


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the report is printed. 2: RUN is not a run directory, has no events, or cannot be read, and stderr says why."""
    return parser().answer(argv, _report)


def parser() -> CommandParser:
    """The command line of the report."""
    parser = CommandParser("jgt report", "Shows where a run's wall time went, over all its starts, and the load of experts.")
    parser.add_argument("run", metavar="RUN", help="the run directory, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _report(arguments: argparse.Namespace) -> None:
    run = Path(arguments.run)
    try:
        accounts = replace(read_accounts(run), experts=read_loads(run))
    except OSError as error:
        raise InputError([f"{error.filename}: cannot be read: {error.strerror or error}"]) from None
    if arguments.json:
        print(json.dumps(accounts.to_json(), indent=1))
    else:
        print_accounts(accounts)


if __name__ == "__main__":
    sys.exit(main())
