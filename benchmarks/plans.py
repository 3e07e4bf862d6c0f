"""Tables of plans, a row for each layout or setting. Each plan runs in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import ROOT, FailedError, make_parser, report, run_process, table


@dataclass(frozen=True, kw_only=True)
class Planner:
    """How the plans of a table are made. target: the GPUs, as `--target` of a plan. preset: `xla.preset`."""

    target: str
    preset: str

    def plan(self, config: str, overrides: Sequence[str], target: str | None = None) -> dict[str, Any]:
        """The output of `jgt plan --json` for a file of the repository. Raises FailedError."""
        command = [sys.executable, "-m", "jgt", "plan", "--config", str(ROOT / config), "--target", target or self.target, "--json"]
        return run_process([*command, *overrides, f"xla.preset={self.preset}"]).found


def run(
    name: str,
    doc: str | None,
    rows: Iterable[str],
    measure: Callable[[str, Planner], dict[str, Any]],
    *,
    target: str = "",
    compare: Callable[[list[dict[str, Any]]], None] | None = None,
) -> None:
    """The main function of such a program: reports measure(row, planner) for the rows on its command line, or for all rows.

    target: the default of `--target`; rows with targets of their own have no such option. compare(rows): adds what follows from several.
    """
    parser = make_parser(doc)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to plan (default: all): {'; '.join(rows)}")
    parser.add_argument("--preset", default="auto", help="xla.preset of the runs (auto)")
    if target:
        parser.add_argument("--target", default=target)
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in rows]:
        parser.error(f"{unknown[0]!r} is not a row. Known rows: {'; '.join(rows)}")
    planner = Planner(target=arguments.target if target else "", preset=arguments.preset)
    try:
        found = [{"row": row} | measure(row, planner) for row in arguments.rows or rows]
    except FailedError as error:
        sys.exit(str(error))
    if compare is not None:
        compare(found)
    of_target = {"target": planner.target} if target else {}
    report(name, of_target | {"preset": planner.preset, "rows": found}, arguments, table(found))
