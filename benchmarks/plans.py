"""Tables of plans. Each row changes some keys of llama-1b.yaml, and each plan runs in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import FailedError, make_parser, report, run_process, table

CONFIG = str(Path(__file__).with_name("llama-1b.yaml"))
TARGET = "h200:1x1"


def run(name: str, doc: str | None, rows: Iterable[str], measure: Callable[[str, str], dict[str, Any]]) -> None:
    """The main function of such a program: reports measure(row, target) for the rows on its command line, or for all rows."""
    parser = make_parser(doc)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to plan (default: all): {'; '.join(rows)}")
    parser.add_argument("--target", default=TARGET)
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in rows]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {'; '.join(rows)}")
    try:
        found = [measure(row, arguments.target) for row in arguments.rows or rows]
    except FailedError as error:
        sys.exit(str(error))
    report(name, {"target": arguments.target, "rows": found}, arguments, table(found))


def plan(overrides: Sequence[str], target: str) -> dict[str, Any]:
    """The output of `jgt plan --json`. Raises FailedError."""
    return run_process([sys.executable, "-m", "jgt", "plan", "--config", CONFIG, "--target", target, "--json", *overrides]).found
