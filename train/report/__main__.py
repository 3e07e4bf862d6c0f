"""The command. Imports neither JAX nor numpy: a report is there at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jgt.document import InputError
from train.report.accounts import read_accounts


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: shown; 2: there is no run there, or it has no events, and stderr says so."""
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
        from train.report.table import show

        show(accounts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.report", description="Where a run's wall time went, over all its starts.")
    parser.add_argument("run", metavar="RUN", help="the run directory, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
