"""A plan as one HTML page: totals, drawings of the step, the memory and the mesh, a row for each signal, and all collectives.

The terminal shows what matters most; the page shows everything, in tables that a click sorts. It is meant to be mailed and to be opened
years later, so it is one file: style, script and the plan's JSON are inside, and it loads nothing from anywhere.

Invariant: every text is escaped. Names of signals and paths of files may contain anything, also `</script>`. A path of this machine, which
means nothing to the page's reader, loses its beginning.
"""

from __future__ import annotations

import collections
import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from jgt.console import axes_text, count_text, size_text, time_text, two_digits
from jgt.planner.plan import Plan
from jgt.planner.view.costs import largest_costs
from jgt.planner.view.drawings import list_of, memory_drawing, mesh_drawing, time_drawing, timeline_drawing
from jgt.planner.view.table import step_text

_MOST_ON_A_LINE = 24
"""The most characters of a cell that is not broken into lines."""
_ABSOLUTE = re.compile(r"(?<![\w.</-])/(?:[\w.@+-]+/){2,}(?=[\w.@+-]+/[\w.@+-]+)")
"""The beginning of an absolute path, all but its last two names."""


def write_page(plan: Plan, path: Path) -> None:
    """Writes the page to a file."""
    path.write_text(page(plan), encoding="utf-8")


def page(plan: Plan) -> str:
    """The page's HTML."""
    style, script = (resources.files("jgt.planner.view").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"jgt plan: {plan.target}, {plan.devices} devices"
    caveat = "" if not plan.step_time_caveat else f'<p class="caveat">{_text(f"The time has no meaning: {plan.step_time_caveat}")}</p>'
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<div class="tiles">{"".join(_tiles(plan))}</div>',
        "" if plan.schedule is None else f"<p>{_text(f'pipeline: {plan.schedule.text}')}</p>",
        caveat,
        _section("What the time of the step is spent on", time_drawing(plan)),
        _section("Memory of one device", memory_drawing(plan)),
        _section("Findings", list_of(plan.warnings) if plan.findings else ""),
        _section("What would help", list_of((a.text for a in plan.advice), "ol") if plan.advice else ""),
        _section("Mesh", mesh_drawing(plan)),
        _section("The step over time", timeline_drawing(plan)),
        _section("Time by signal" if plan.step_time_ms is not None else "Bytes sent by signal", _bars(plan)),
        _section("Signals", _signals(plan)),
        _section("Largest costs", list_of([line.partition(" ")[2] for line in largest_costs(plan)], "ol")),
        _section("Memory by kind", _memory(plan)),
        _section("Collectives", _collectives(plan)),
        _section("Assumptions", list_of(plan.assumptions)),
    ]
    # Inside a script element HTML knows no escapes, but JSON does: without a "<" the element cannot be closed too early.
    data = json.dumps(plan.to_json()).replace("<", "\\u003c")
    return _shortened(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body><main>\n{''.join(parts)}\n</main>"
        f'<script type="application/json" id="plan">{data}</script><script>{script}</script></body></html>\n'
    )


def _shortened(text: str) -> str:
    """A text whose absolute paths have lost their beginnings."""
    return _ABSOLUTE.sub("", text.replace(f"{Path.cwd()}/", ""))


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(title: str, content: str) -> str:
    """A section; none without content."""
    return f"<section><h2>{_text(title)}</h2>{content}</section>\n" if content else ""


def _tiles(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    room = "" if memory.hbm_bytes is None else f"of {size_text(memory.hbm_bytes)}, {'fits' if memory.fits else 'does not fit'}"
    tiles = [
        ("peak memory", size_text(memory.peak_bytes), room),
        ("sent in a step", size_text(plan.sent_bytes), "by one device"),
        ("FLOPs in a step", f"{count_text(plan.flops_per_device / 1e12)} TFLOP", "of one device, with recompute and bubbles"),
    ]
    if plan.step_time_ms is not None and not plan.step_time_caveat:
        tiles.insert(0, ("predicted step", step_text(plan), "compare layouts by it"))
    if plan.speed is not None and not plan.step_time_caveat:
        speed = plan.speed
        if speed.tokens_per_s is not None:
            tiles.insert(1, ("tokens/s", two_digits(speed.tokens_per_s), f"{two_digits(speed.tokens_per_s / plan.devices)} on each device"))
        tiles.insert(2, ("MFU", f"{speed.mfu:.0%}", f"{two_digits(speed.model_tflops_per_device)} TFLOP/s of the model on each device"))
        if speed.dollars_per_million_tokens is not None and speed.dollars_per_hour is not None:
            cost = f"${two_digits(speed.dollars_per_million_tokens)}"
            tiles.insert(3, ("a million tokens", cost, f"${two_digits(speed.dollars_per_hour)} an hour"))
    for name, value, note in tiles:
        state = " bad" if memory.fits is False and name == "peak memory" else ""
        yield f'<div class="tile{state}"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'


def _bars(plan: Plan) -> str:
    timed = plan.step_time_ms is not None
    values = [
        (row.signal, (row.compute_ms or 0.0, row.exposed_ms or 0.0) if timed else (0.0, float(sum(row.sent.values()))))
        for row in plan.signals
    ]
    # The longest bar fills the column; 1 avoids a division by zero in a program that sends nothing.
    most = max((sum(parts) for _, parts in values), default=0.0) or 1.0
    lines: list[str] = []
    for signal, (compute, waiting) in sorted(values, key=lambda item: -sum(item[1])):
        shown = time_text((compute + waiting) / 1e3) if timed else size_text(waiting)
        bars = (("compute", compute), ("waiting", waiting))
        parts = "".join(f'<i class="{kind}" style="width:{100 * value / most:.2f}%"></i>' for kind, value in bars)
        lines.append(f'<tr><th>{_text(signal)}</th><td class="bar">{parts}</td><td>{_text(shown)}</td></tr>')
    legend = '<p><i class="key compute"></i>kernels <i class="key waiting"></i>waiting for collectives</p>' if timed else ""
    return f'{legend}<table class="bars">{"".join(lines)}</table>'


_Cell = tuple[str, str | float] | str | int
"""A cell's text and its sort key; or what is both."""


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[_Cell]]) -> str:
    """A table that a click on a heading sorts. Columns of numeric keys align right; columns without any text are left out."""
    cells = [[cell if isinstance(cell, tuple) else (cell, cell) for cell in row] for row in rows]
    used = [n for n in range(len(columns)) if any(str(row[n][0]) for row in cells)]
    columns, cells = [columns[n] for n in used], [[row[n] for n in used] for row in cells]
    # The script sorts by `data-key`, so "1.2 GB" sorts by its bytes.
    numeric = [all(isinstance(row[n][1], int | float) and not _is_long(row[n][0]) for row in cells) for n in range(len(columns))]
    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    head = "".join(f'<th{kind}><button type="button">{_text(c)}</button></th>' for c, kind in zip(columns, kinds, strict=True))
    body = "".join("<tr>" + "".join(_cell(*cell, kind) for cell, kind in zip(row, kinds, strict=True)) + "</tr>" for row in cells)
    return f'<div class="scroll"><table class="sortable" id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(shown: object, key: object, kind: str) -> str:
    kind = ' class="long"' if _is_long(shown) else kind
    return f'<td{kind} data-key="{_text(key)}">{_text(shown)}</td>'


def _is_long(shown: object) -> bool:
    return len(str(shown)) > _MOST_ON_A_LINE


def _size(count: float) -> tuple[str, float]:
    return (size_text(count) if count else "", count)


def _ms(value: float | None) -> tuple[str, float]:
    return (two_digits(value) if value else "", value or 0.0)


def _signals(plan: Plan) -> str:
    def rows() -> Iterator[list[_Cell]]:
        for row in plan.signals:
            over = ", ".join(f"{axes} {size_text(count)}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1]))
            parts = sorted(row.roofline_ms.items(), key=lambda i: -i[1])
            # The widest part of the roofline is what the signal is bound by, so the column sorts by it.
            roofline = (", ".join(f"{part} {two_digits(ms)}" for part, ms in parts), parts[0][1] if parts else 0.0)
            sizes = [_size(n) for n in (row.parameter_bytes, row.activation_bytes, sum(row.sent.values()))]
            flops = (count_text(row.flops / 1e9) if row.flops else "", row.flops)
            yield [row.signal, "; ".join(row.specs), *sizes, over, flops, _ms(row.compute_ms), _ms(row.exposed_ms), roofline]

    columns = ["signal", "spec", "parameters", "activations", "sent", "over", "GFLOP", "ms", "exposed ms", "roofline ms"]
    return _table("signals", columns, rows())


def _collectives(plan: Plan) -> str:
    columns = ["signal", "phase", "kind", "type", "axes", "bytes", "count", "total", "source", "rule"]
    rules = collections.defaultdict(str, {row.signal: row.rule for row in plan.signals})
    rows = (
        (
            c.signal,
            c.phase,
            c.kind,
            c.dtype,
            axes_text(c.axes),
            _size(c.bytes),
            c.count,
            _size(c.total_bytes),
            c.source,
            rules.get(c.signal, ""),
        )
        for c in plan.collectives
    )
    return _table("collectives", columns, rows)


def _memory(plan: Plan) -> str:
    memory = plan.memory
    totals = {"temporary, in total": memory.temp_bytes, "peak": memory.peak_bytes, "in the host's memory": memory.host_bytes}
    rows = [(name, name, count) for name, count in memory.groups.items()]
    rows += [(f"activations for the backward pass: {signal}", signal, count) for signal, count in memory.activations.items()]
    rows += [(name, name, count) for name, count in totals.items()]
    return _table("memory", ["memory", "size"], (((name, key), _size(count)) for name, key, count in rows if count))
