"""A plan as one HTML page: the text of the terminal, the step over time, a row for each signal, and all collectives.

The page is meant to be mailed, so it is one file and loads nothing from anywhere. Invariant: every text is escaped, since names of signals
and paths of files may contain anything, also `</script>`. A path of this machine, which means nothing to the page's reader, loses its
beginning.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from jgt.command.console import amount, axes_text, two_digits
from jgt.planner.panels import Panel, Span
from jgt.planner.plan import Plan
from jgt.planner.signals import folded
from jgt.planner.view.table import print_plan

_MOST_ON_A_LINE = 24
"""The most characters of a cell that is not broken into lines."""
_NAMED = 7.0
"""The percentage of a panel from which a span has room for its name."""
_HUES = 12
"""The number of colours. A signal has one colour in all panels."""
_ABSOLUTE = re.compile(r"(?<![\w.</-])/(?:[\w.@+-]+/){2,}(?=[\w.@+-]+/[\w.@+-]+)")
"""The beginning of an absolute path, all but its last two names."""


def page(plan: Plan) -> str:
    """The page's HTML."""
    template = Template(resources.files("jgt.planner.view").joinpath("page.html").read_text(encoding="utf-8"))
    text = io.StringIO()
    print_plan(plan, text)
    signals = [row.signal for row in plan.signals]
    panels = "".join(_panel(panel, signals) for panel in plan.timeline)
    sections = {"The step over time": panels, "Signals": _signals(plan), "Collectives": _collectives(plan)}
    filled = template.substitute(
        title=_text(f"jgt plan: {plan.target}, {plan.devices} devices"),
        text=_text(text.getvalue()),
        sections="\n".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections.items() if content),
        # Inside a script element HTML knows no escapes, but JSON does: without a "<" the element cannot be closed too early.
        data=json.dumps(plan.to_json()).replace("<", "\\u003c"),
    )
    return _ABSOLUTE.sub("", filled.replace(f"{Path.cwd()}/", ""))


def _text(value: object) -> str:
    return html.escape(str(value))


def _panel(panel: Panel, signals: Sequence[str]) -> str:
    times = f", {panel.trips:,} times" if panel.trips > 1 else ""
    lanes = ""
    for lane in ("device", "links"):
        blocks = "".join(_block(span, panel.ms, signals) for span in panel.spans if span.lane == lane)
        lanes += f'<div class="lane"><span>{lane}</span><div>{blocks}</div></div>'
    return f'<div class="panel"><p>{_text(panel.title)}{times}: {amount(panel.ms / 1e3, "s")}</p>{lanes}</div>'


def _block(span: Span, whole_ms: float, signals: Sequence[str]) -> str:
    left, width = 100 * span.start / whole_ms, 100 * (span.end - span.start) / whole_ms
    name = span.signal if span.lane == "device" and span.kind == "kernels" else f"{span.kind}: {span.signal}"
    if span.kind == "loop":
        name = f"{span.trips:,} x {span.signal}"
    kind = span.kind if span.kind in ("waiting", "loop") else "kernels"
    hue = 360 * (signals.index(span.signal) % _HUES) // _HUES if span.signal in signals else 0
    title = _text(f"{name}, {span.phase}: {amount((span.end - span.start) / 1e3, 's')}")
    style = f"left:{left:.2f}%;width:{width:.2f}%;--hue:{hue}"
    return f'<i class="{kind}" style="{style}" title="{title}">{_text(name) if width > _NAMED else ""}</i>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | int]], numbers: Sequence[str]) -> str:
    """A table whose columns in `numbers` align right; columns without any text are left out."""
    cells = [[str(cell) for cell in row] for row in rows]
    used = [n for n in range(len(columns)) if any(row[n] for row in cells)]

    def cell(tag: str, text: str, column: str) -> str:
        kind = ' class="number"' if column in numbers else ' class="long"' if len(text) > _MOST_ON_A_LINE else ""
        return f"<{tag}{kind}>{_text(text)}</{tag}>"

    lines = [("th", columns), *(("td", row) for row in cells)]
    body = "".join("<tr>" + "".join(cell(tag, row[n], columns[n]) for n in used) + "</tr>" for tag, row in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def _signals(plan: Plan) -> str:
    def rows() -> Iterator[list[str]]:
        for row in folded(plan.signals):
            over = ", ".join(f"{axes} {amount(count, 'B')}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1]))
            roofline = ", ".join(f"{part} {two_digits(ms)}" for part, ms in sorted(row.roofline_ms.items(), key=lambda i: -i[1]))
            sizes = [amount(n, "B") if n else "" for n in (row.parameter_bytes, row.activation_bytes, sum(row.sent.values()))]
            times = [two_digits(ms) if ms else "" for ms in (row.compute_ms, row.exposed_ms)]
            yield [row.signal, "; ".join(row.specs), *sizes, over, amount(row.flops / 1e9) if row.flops else "", *times, roofline]

    numbers = ["parameters", "activations", "sent", "GFLOP", "ms", "exposed ms"]
    return _table(["signal", "spec", "parameters", "activations", "sent", "over", *numbers[3:], "roofline ms"], rows(), numbers)


def _collectives(plan: Plan) -> str:
    rules = {row.signal: row.rule for row in plan.signals}
    columns = ["signal", "phase", "kind", "type", "axes", "bytes", "count", "total", "source", "rule"]
    rows = (
        (c.signal, c.phase, c.kind, c.dtype, axes_text(c.axes), amount(c.bytes, "B"), c.count, amount(c.total_bytes, "B"), c.source, rule)
        for c in plan.collectives
        for rule in (rules.get(c.signal, ""),)
    )
    return _table(columns, rows, ["bytes", "count", "total"])
