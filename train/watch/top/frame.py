"""A frame of `jgt top`: a run as lines of a screen of any size, each line as pieces of text with a style.

A person asks first how far the run is and whether it is well, then what it does now, and then which process is to blame. So the lines come
in this order. On a small screen the table of processes shrinks, whose worst rows are its first, and the parts below it are left out. Text
from files was made printable when it was read (`members.clean`), and no line is wider than the screen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from jgt import amount

from ...journal.events import Event
from ...journal.members import ProcessStatus, clean, number, whole
from ...settings.formats import duration_text
from ..runs import Point, thinned
from .view import RunView

Line = list[tuple[str, str]]
"""Pieces of text, each with a style of rich; empty for none."""

_BARS = "▁▂▃▄▅▆▇█"
_LANE_SECONDS = 5.0
_LANES = {
    "step": ("=", "green"),
    "compile": ("c", "magenta"),
    "trace": ("c", "magenta"),
    "save": ("s", "cyan"),
    "eval": ("e", "blue"),
    "init": ("i", "magenta"),
    "restore": ("r", "cyan"),
    "verify": ("r", "cyan"),
    "start": ("o", "yellow"),
    "open": ("o", "yellow"),
    "hook": ("h", "blue"),
    "profile": ("p", "blue"),
}
_STATES = {0: "bold red", 1: "bold yellow", 2: "yellow", 3: "yellow", 4: ""}
_COLUMNS_40 = {"proc": ">4", "phase": "<9", "since": ">6"}
_COLUMNS_80 = {"proc": ">4", "host": "<8", "phase": "<9", "since": ">6", "data": ">4", "own": ">4", "wait": ">4", "mem": ">7"}
_COLUMNS = {"proc": ">4", "host": "<16", "phase": "<9", "since": ">6", "step": ">10", **dict(list(_COLUMNS_80.items())[4:]), "power": ">5"}
"""The columns of the table of processes, with their widths, for screens of up to 60, of up to 100, and of more characters."""
_KEYS = "q quit  space pause  s save  p profile"


def draw_frame(view: RunView, width: int, height: int, said: str = "") -> list[Line]:
    """The lines of a frame, at most `height`, none wider than `width`. said: what a key has done, in place of the keys."""
    top = [*_head(view, width), *_now(view)]
    below = list(_signals(view, width)) if height >= 22 else []
    if height >= 40:
        below = [*_curves(view, width), *below]
    wide = width >= 120
    last = _events(view, max(1, height // 10) if height >= 16 else 0)
    room = max(2, height - len(top) - len(below) - len(last) - 2)
    table = _table(view, width, room // 2 if wide else room)
    lanes = _lanes(view, width, max(0, room - len(table) - 1)) if wide else []
    lines = [*top, *table, *lanes, *below, *last]
    return [_cut(line, width) for line in [*lines[: height - 1], [(said or _KEYS, "dim")]]]


def _head(view: RunView, width: int) -> Iterator[Line]:
    total, step, loss = view.total, view.step, view.last("loss")
    parts = [f"step {step:,}" + (f"/{total:,}  {step / total:.0%}" if total else "")]
    parts += [f"{label} {value:{form}}" for label, name, form in _FIGURES if (value := view.last(name)) is not None]
    eta = "" if view.eta_s is None else f"eta {_long(view.eta_s)}"
    yield [(view.name, "bold"), ("  " + "  ".join(parts), ""), (f"  {eta}", "bold")]
    speed = view.last("tokens_per_s") or view.last("samples_per_s")
    unit = "tok/s" if view.last("tokens_per_s") is not None else "samples/s"
    ended = ", ".join(f"{count} {why}" for why, count in view.restarts_after.items())
    start = f"start {view.starts}" + (f" ({ended})" if ended else "")
    known = [
        None if speed is None else f"{amount(speed)} {unit}",
        None if (mfu := view.last("mfu")) is None else f"mfu {mfu:.0%}",
        None if view.goodput is None else f"goodput {view.goodput:.1%}",
        start,
        f"{view.skipped} skipped" if view.skipped else None,
    ]
    yield [("  ".join(part for part in known if part), ""), (time.strftime("   %H:%M:%S", time.localtime(view.now)), "dim")]
    if width >= 60:
        each = (width - 32) // 2
        losses, times = view.curve("loss"), view.curve("step_time_s")
        line: Line = [("loss ", "dim"), (_spark(losses, each), "green"), ("" if loss is None else f" {loss:.4g}", "")]
        if times:
            line += [("   step ", "dim"), (_spark(times, each), "cyan"), (f" {amount(times[-1], 's')}", "")]
        yield line


_FIGURES = (("loss", "loss", ".4g"), ("gn", "grad_norm", ".3g"), ("lr", "lr", ".1e"))


def _now(view: RunView) -> Iterator[Line]:
    """A line with the work of the first process that runs."""
    running = sorted((m for m in view.members if m.state == "runs"), key=lambda m: m.process)
    parts = list[str]()
    if running:
        first = running[0]
        what = f"step {first.step:,}" if first.phase == "step" and first.step is not None else first.phase
        limit = "" if first.limit_s is None else f" of at most {_short(first.limit_s)}"
        parts.append(f"now   {what}, {_short(first.since_s)}{limit}")
        parts += [f"saving {step:,} for {_short(since)}" for m in running if m.saving for step, since in [m.saving]]
    elif view.restarting_s is not None:
        parts.append(f"now   the launcher starts the processes again in {_short(view.restarting_s)}")
    elif view.members:
        age = min(m.age_s for m in view.members)
        parts.append(f"now   nothing runs; the last word is {_long(age)} old")
    else:
        parts.append("now   no process has a status: the run is of an older version, or has not begun")
    yield [("      ".join(parts), "bold")]


def _table(view: RunView, width: int, room: int) -> list[Line]:
    """The table of processes in at most `room` lines. The last line says how many others there are."""
    members = view.members
    if not members:
        return []
    shown = list(members[: room - 1 if len(members) < room else room - 2])
    columns = _COLUMNS if width >= 100 else _COLUMNS_80 if width >= 60 else _COLUMNS_40
    head = " ".join(f"{name:{form}}" for name, form in columns.items()) + "  note"
    rows = [_row(member, columns) for member in shown]
    rest = members[len(shown) :]
    if rest:
        steps = {m.step or 0 for m in rest}
        at = f", all at step {min(steps):,}" if len(steps) == 1 else ""
        rows.append([(f"  ... {len(rest):,} more{at}", "dim")])
    return [[(head, "dim")], *rows]


def _row(member: ProcessStatus, columns: Mapping[str, str]) -> Line:
    used, limit = max(member.memory, key=lambda pair: pair[0], default=(0.0, 0.0))
    shares = member.shares if member.phase == "step" else None
    is_there = member.state == "runs"
    cells = {
        "proc": str(member.process),
        "host": member.host,
        "phase": member.phase if is_there else member.state,
        "since": _short(member.since_s) if is_there else "--",
        "step": "" if member.step is None else f"{member.step:,}",
        **dict(zip(("data", "own", "wait"), ("", "", "") if shares is None else [f"{share:.0%}" for share in shares], strict=True)),
        "mem": f"{used / 1e9:.0f}/{limit / 1e9:.0f}G" if limit else "",
        "power": "" if member.power_w is None else f"{member.power_w:.0f}W",
    }
    # Cut, so that no long name of a host shifts the columns behind it.
    text = " ".join(f"{cells[name][: int(form[1:])]:{form}}" for name, form in columns.items())
    return [(text, _STATES[member.severity]), ("  " + "; ".join(member.notes), "bold")]


def _lanes(view: RunView, width: int, room: int) -> list[Line]:
    """Lines with the phases of the worst processes in the last minutes, a character for five seconds."""
    columns = width - 8
    if room < 2 or not view.lanes:
        return []
    begin = view.now - columns * _LANE_SECONDS
    lines: list[Line] = [
        [(f"the last {_long(columns * _LANE_SECONDS)}: = steps, c compiling, s saving, e evaluating, o opening, r restoring", "dim")]
    ]
    for process, events in itertools.islice(view.lanes.items(), room - 1):
        cells = [(" ", "")] * columns
        for event in events:
            first, last = ((at - begin) / _LANE_SECONDS for at in (event.time, event.time + event.seconds))
            # A phase that is shorter than a character is shown, and a longer one covers what it contains.
            for cell in range(max(0, int(first)), min(columns, max(int(first) + 1, int(last)))):
                cells[cell] = _LANES.get(event.phase, cells[cell])
        parts = [("".join(text for text, _ in group), style) for style, group in itertools.groupby(cells, key=lambda cell: cell[1])]
        lines.append([(f"{process:>6} ", "dim"), *parts])
    return lines


def _curves(view: RunView, width: int) -> Iterator[Line]:
    """Sparklines of further metrics."""
    for name in ("eval_loss", "tokens_per_s", "grad_norm", "memory_bytes"):
        values = view.curve(name)
        if values:
            yield [(f"{name:<13}", "dim"), (_spark(values, width - 30), "green"), (f" {amount(values[-1])}", "")]


def _signals(view: RunView, width: int) -> Iterator[Line]:
    """The device time of the last profile by signal, in as many columns as fit."""
    table, rows = view.signals, list[tuple[str, float]]()
    listed = table.get("signals")
    for row in listed[:200] if isinstance(listed, list) else ():
        if isinstance(row, dict) and (share := number(row.get("share"))) is not None:
            rows.append((clean(row.get("signal"), 24), min(1.0, max(0.0, share))))
    step_ms, idle_ms, at = (number(table.get(name)) for name in ("step_ms", "idle_ms", "time"))
    if not rows or not step_ms:
        return
    if idle_ms:
        rows.append(("idle", min(1.0, max(0.0, idle_ms / step_ms))))
    age = "" if at is None else f", {_long(max(0.0, view.now - at))} old"
    yield [(f"step by signal (profile of step {whole(table.get('last')) or 0:,}{age}; p: again)", "dim")]
    columns = max(1, width // 40)
    best = sorted(rows, key=lambda row: -row[1])[: 3 * columns]
    for group in itertools.zip_longest(*[iter(best)] * columns):
        yield [
            piece
            for row in group
            if row
            for piece in ((f"  {row[0]:<20} ", ""), (f"{'█' * round(10 * row[1]):<10}", "green"), (f" {row[1]:>4.0%}  ", ""))
        ]


def _events(view: RunView, room: int) -> list[Line]:
    return [[(_event_text(event), "dim")] for event in view.events[-room:]] if room else []


def _event_text(event: Event) -> str:
    at, step = time.strftime("%H:%M", time.localtime(min(event.time, 4e9))), event.natural("step")
    why = event.text("why") or event.text("kind") or ""
    took = f" {amount(event.seconds, 's')}" if event.seconds else ""
    return f"{at} {clean(event.phase)}{'' if step is None else f' {step:,}'}{took}{' ' if why else ''}{clean(why, 80)}"


def _cut(line: Line, width: int) -> Line:
    """The line without what does not fit."""
    cut, left = Line(), width
    for text, style in line:
        if left > 0 and text:
            cut.append((text[:left], style))
        left -= len(text)
    return cut


def _spark(values: Sequence[float], columns: int) -> str:
    """A curve in one line, `columns` characters at most."""
    points = thinned([Point(0.0, value) for value in values], max(1, columns))
    # Means of equal values differ in their last digits, which is not a curve.
    shown = [float(f"{point.y:.6g}") for point in points]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(_BARS[0 if high <= low else min(7, int((value - low) / (high - low) * 8))] for value in shown)


def _short(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}s" if seconds < 100 else _long(seconds)


def _long(seconds: float) -> str:
    """`45s`, `12m`, `1h02m`, `3d04h`."""
    return duration_text(min(seconds, 1e9), is_rough=True)


def plain(lines: Sequence[Line]) -> str:
    """The lines as text without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
