"""A run's accounts for a person: the goodput, where the rest went, its starts, its speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jgt.plan.units import count_text
from train.report.accounts import CAUSES, NO_RECORD, Accounts
from train.report.starts import Start

WIDTH_OF_FILES = 160
"""Columns where there is no terminal."""

MAX_STARTS = 20
MAX_PROCESSES = 8
BAR = 30
"""Columns of a bar that is all of the wall time."""


def show(accounts: Accounts) -> None:
    """Writes accounts to stdout."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    useful = accounts.causes["steps"].seconds
    of_wall = f"{_time(useful)} of {_time(accounts.wall_s)} in {_number(accounts.steps, 'step')} that {'counts' if accounts.steps == 1 else 'count'}"
    console.print(Text(f"{accounts.run}: goodput {accounts.goodput:.1%}: {of_wall}", style="bold"), soft_wrap=True)
    console.print(_causes(accounts, "#" if console.options.ascii_only else "█"))
    console.print(_starts(accounts.starts))
    console.print(_throughput(accounts))
    if accounts.stragglers is not None:
        console.print(_processes(accounts))
    for line in _counts(accounts):
        console.print(Text(line), soft_wrap=True)


def _make_table(title: str, columns: Sequence[str], texts: int) -> Table:
    """A table whose first `texts` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", min_width=len(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", overflow="fold")
    return table


def _causes(accounts: Accounts, block: str) -> Table:
    """Steps first, then what costs most; what costs nothing is left out."""
    table = _make_table("Wall time", ["spent on", "seconds", "share"], 1)
    table.add_column("")
    rows = sorted(accounts.causes.items(), key=lambda row: (row[0] != "steps", -row[1].seconds))
    for cause, part in rows:
        if part.seconds or cause == "steps":
            label = f"{CAUSES[cause]} ({accounts.steps_redone:,})" if cause == "redone" else CAUSES[cause]
            table.add_row(label, f"{part.seconds:,.1f}", f"{part.share:.1%}", block * round(BAR * part.share))
    table.add_row("all", f"{accounts.wall_s:,.1f}", "", "")
    return table


def _starts(starts: Sequence[Start]) -> Table:
    left_out = max(0, len(starts) - MAX_STARTS)
    title = f"Starts, the last {MAX_STARTS} of {len(starts)}" if left_out else "Starts"
    table = _make_table(title, ["", "begun (UTC)", "ended", "lasted", "from step", "to step", "processes", "devices"], 3)
    for number, start in enumerate(starts[left_out:], left_out + 1):
        begun = datetime.fromtimestamp(start.begin, UTC).strftime("%Y-%m-%d %H:%M:%S")
        counts = ["" if n is None else f"{n:,}" for n in (start.resumed, start.reached, start.processes, start.devices)]
        table.add_row(*map(Text, [str(number), begun, start.ended or NO_RECORD, _time(start.end - start.begin), *counts]))
    return table


def _throughput(accounts: Accounts) -> Table:
    speed = accounts.throughput
    table = _make_table("Speed", ["", "in steps that count", "in wall time"], 1)
    table.add_row("steps/s", _rate(speed.steps_per_s), _rate(speed.steps_per_s_wall))
    table.add_row("tokens/s", _rate(speed.tokens_per_s), _rate(speed.tokens_per_s_wall))
    return table


def _processes(accounts: Accounts) -> Table:
    found = accounts.stragglers
    assert found is not None
    table = _make_table("Stragglers: own work of each host", ["process", "host", "a step"], 2)
    for busy in found.processes[:MAX_PROCESSES]:
        table.add_row(*map(Text, [str(busy.process), busy.host or "", _milliseconds(busy.step_s)]))
    return table


def _counts(accounts: Accounts) -> list[str]:
    """What happened, in lines."""
    speed, found, happened = accounts.throughput, accounts.stragglers, []
    if found is not None:
        spread = "" if found.spread is None else f" {found.spread:.2f}"
        host = "" if found.host is None else f" ({found.host})"
        works = f"works {_milliseconds(found.slowest_s)} a step, the median {_milliseconds(found.median_s)}"
        happened.append(f"Straggler spread{spread}: process {found.slowest}{host} {works}")
    if speed.median_step_s is not None and speed.slowest_step_s is not None:
        slowest = f"{_milliseconds(speed.slowest_step_s)} in steps {speed.slowest_first} to {speed.slowest_last}"
        happened.append(f"A step took {_milliseconds(speed.median_step_s)} in the median stretch, at most {slowest}")
    skipped = sum(accounts.skipped.values())
    happened.append(
        f"{_number(accounts.restarts, 'restart')}{_kinds(accounts.restarts_after)}, {_number(skipped, 'skipped update')}{_kinds(accounts.skipped)}, "
        f"{_number(accounts.failed_saves, 'failed save')}, {_number(sum(accounts.faults.values()), 'injected fault')}{_kinds(accounts.faults)}"
    )
    if accounts.unreadable_lines:
        happened.append(f"{_number(accounts.unreadable_lines, 'line')} of the events files could not be read")
    return happened


def _kinds(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{kind} {count:,}" for kind, count in counts.items() if count)
    return f" ({shown})" if shown else ""


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else count_text(rate)


def _milliseconds(seconds: float) -> str:
    return f"{count_text(seconds * 1000)} ms"


def _time(seconds: float) -> str:
    """Seconds; from a minute on also minutes, hours and days."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
