"""The command line of the report. It imports neither JAX nor numpy, so that it answers at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jgt.document import InputError
from train.report.accounts import read_accounts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Exit code 2, with the reason on stderr, if RUN is not a run directory, has no events, or cannot be read."""
    arguments = _parser().parse_args(argv)
    try:
        accounts = read_accounts(Path(arguments.run))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(accounts.to_json(), indent=1))
    else:
        from train.report.table import print_accounts

        print_accounts(accounts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.report", description="Shows where a run's wall time went, over all its starts.")
    parser.add_argument("run", metavar="RUN", help="the run directory, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
