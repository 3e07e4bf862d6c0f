"""Prints a run's accounts as tables: the goodput, what the rest of the time was spent on, the starts, and the speed.

The reader of a run asks first how much of the time counted, and what took the rest. So the goodput is the first line, the causes follow by
their size, and only then come the starts, the speed and the stragglers. Every number follows from `Accounts`, so tables and JSON agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from jgt import Console, amount

from ..journal.accounts import CAUSES, NO_RECORD, Accounts
from ..journal.events import StartSummary
from .heat_map import MARGIN, describe_loads

_MAX_STARTS, _MAX_PROCESSES = 20, 8
"""The rows of the tables of starts and of stragglers. The JSON has all."""
_MAX_COLUMNS = 100
"""The width of the heat map of experts, with its margin."""
_BAR = 30
"""The width of a bar for all of wall time, in characters."""


def print_accounts(accounts: Accounts) -> None:
    """Prints accounts to stdout."""
    console = Console()
    useful = accounts.causes["steps"].seconds
    steps = f"{_number(accounts.steps, 'step')} that {'counts' if accounts.steps == 1 else 'count'}"
    of_wall = f"{_time(useful)} of {_time(accounts.wall_s)} in {steps}"
    console.print(f"{accounts.run}: goodput {accounts.goodput:.1%}: {of_wall}", style="bold", soft_wrap=True)
    # A terminal without Unicode gets # in its bars.
    block = "#" if console.options.ascii_only else "█"
    table = Console.table("Wall time", ["spent on", "seconds", "share", ""], 1, _causes(accounts, block))
    table.columns[-1].justify = "left"
    console.print(table)
    left_out = max(0, len(accounts.starts) - _MAX_STARTS)
    title = f"Starts, the last {_MAX_STARTS} of {len(accounts.starts)}" if left_out else "Starts"
    columns = ["", "began (UTC)", "ended", "lasted", "from step", "to step", "processes", "devices"]
    console.print(Console.table(title, columns, 3, [_start(n, s) for n, s in enumerate(accounts.starts[left_out:], left_out + 1)]))
    speed = accounts.throughput
    rates = {"steps/s": (speed.steps_per_s, speed.steps_per_s_wall), "tokens/s": (speed.tokens_per_s, speed.tokens_per_s_wall)}
    rows = [[name, *("" if rate is None else amount(rate) for rate in both)] for name, both in rates.items()]
    console.print(Console.table("Speed", ["", "in steps that count", "in wall time"], 1, rows))
    if accounts.stragglers is not None:
        busiest = accounts.stragglers.processes[:_MAX_PROCESSES]
        rows = [[str(busy.process), busy.host or "", _milliseconds(busy.step_s)] for busy in busiest]
        console.print(Console.table("Stragglers: own work of each host", ["process", "host", "per step"], 2, rows))
    for line in _closing_lines(accounts):
        console.print(line, soft_wrap=True)
    if accounts.experts is not None:
        width = min(console.width, _MAX_COLUMNS) - MARGIN
        for line in describe_loads(accounts.experts, width, is_ascii=console.options.ascii_only):
            console.print(line, soft_wrap=True)


def _causes(accounts: Accounts, block: str) -> Iterator[list[str]]:
    """A row for the steps, and for each other cause with any seconds, the largest first. block: the character of the bars."""
    # Steps are what a run is for, so they come first, whatever their share.
    for cause, part in sorted(accounts.causes.items(), key=lambda row: (row[0] != "steps", -row[1].seconds)):
        if part.seconds or cause == "steps":
            label = f"{CAUSES[cause]} ({accounts.steps_redone:,})" if cause == "redone" else CAUSES[cause]
            yield [label, f"{part.seconds:,.1f}", f"{part.share:.1%}", block * round(_BAR * part.share)]
    yield ["all", f"{accounts.wall_s:,.1f}", "", ""]


def _start(number: int, start: StartSummary) -> list[str]:
    began = datetime.fromtimestamp(start.begin, UTC).strftime("%Y-%m-%d %H:%M:%S")
    counts = ["" if n is None else f"{n:,}" for n in (start.resumed, start.reached, start.processes, start.devices)]
    return [str(number), began, start.ended or NO_RECORD, _time(start.end - start.begin), *counts]


def _closing_lines(accounts: Accounts) -> Iterator[str]:
    """The straggler, the slowest steps, and the numbers of restarts, skipped updates, failed saves and faults, and comparisons."""
    speed, stragglers = accounts.throughput, accounts.stragglers
    if stragglers is not None:
        spread = "" if stragglers.spread is None else f" {stragglers.spread:.2f}"
        host = "" if stragglers.host is None else f" ({stragglers.host})"
        works = f"works {_milliseconds(stragglers.slowest_s)} per step, the median process {_milliseconds(stragglers.median_s)}"
        yield f"Straggler spread{spread}: process {stragglers.slowest}{host} {works}"
    if speed.median_step_s is not None and speed.slowest_step_s is not None:
        slowest = f"{_milliseconds(speed.slowest_step_s)} in steps {speed.slowest_first} to {speed.slowest_last}"
        yield f"A step took {_milliseconds(speed.median_step_s)} in the median stretch, at most {slowest}"
    skipped, faults = sum(accounts.skipped.values()), sum(accounts.faults.values())
    restarts = f"{_number(accounts.restarts, 'restart')}{_kinds(accounts.restarts_after)}"
    updates = f"{_number(skipped, 'skipped update')}{_kinds(accounts.skipped)}"
    saves = _number(accounts.failed_saves, "failed save")
    yield f"{restarts}, {updates}, {saves}, {_number(faults, 'injected fault')}{_kinds(accounts.faults)}"
    if accounts.layout_cpu_s:
        yield f"Comparing the layout with one device took {_number(accounts.layout_cpu_s, 'CPU-second')} beside the run"
    if accounts.unreadable_lines:
        yield f"{_number(accounts.unreadable_lines, 'line')} of the events files could not be read"


def _kinds(counts: Mapping[str, int]) -> str:
    """The counts above 0 in parentheses: ` (killed 2, done 1)`."""
    listed = ", ".join(f"{kind} {count:,}" for kind, count in counts.items() if count)
    return f" ({listed})" if listed else ""


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _milliseconds(seconds: float) -> str:
    return f"{amount(seconds * 1000)} ms"


def _time(seconds: float) -> str:
    """`52.3 s`, or `0:01:32` from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
