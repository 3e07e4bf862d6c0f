"""A plan as one HTML page: totals, a drawing of the mesh, a bar and a row for each signal, and all collectives.

The terminal shows what matters most; the page shows everything, in tables that a click sorts. It is meant to be mailed and to be opened
years later, so it is one file: style, script and the plan's JSON are inside, and it loads nothing from anywhere.

Invariant: every text is escaped. Names of signals and paths of files may contain anything, also `</script>`.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from jgt.console import axes_text, count_text, size_text
from jgt.planner.plan import Plan
from jgt.planner.view.costs import largest_costs

_MOST_DRAWN = 64
"""The most devices that the drawing of a mesh shows: the first ones of a larger mesh."""
_MOST_ON_A_LINE = 24
"""The most characters of a cell that is not broken into lines."""


def write_page(plan: Plan, path: Path) -> None:
    """Writes the page to a file."""
    path.write_text(page(plan), encoding="utf-8")


def page(plan: Plan) -> str:
    """The page's HTML."""
    style, script = (resources.files("jgt.planner.view").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"jgt plan: {plan.target}, {plan.devices} devices"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<div class="tiles">{"".join(_tiles(plan))}</div>',
        _section("Mesh", _mesh(plan)),
        _section("Time by signal" if plan.step_time_ms is not None else "Bytes sent by signal", _bars(plan)),
        _section("Signals", _signals(plan)),
        _section("Findings", _list(plan.warnings)) if plan.findings else "",
        _section("Largest costs", _list([line.partition(" ")[2] for line in largest_costs(plan)], "ol")),
        _section("Memory of one device", _memory(plan)),
        _section("Collectives", _collectives(plan)),
        _section("Assumptions", _list(plan.assumptions)),
    ]
    # Inside a script element HTML knows no escapes, but JSON does: without a "<" the element cannot be closed too early.
    data = json.dumps(plan.to_json()).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body><main>\n{''.join(parts)}\n</main>"
        f'<script type="application/json" id="plan">{data}</script><script>{script}</script></body></html>\n'
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>\n"


def _list(lines: Sequence[str], kind: str = "ul") -> str:
    return f"<{kind}>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + f"</{kind}>"


def _tiles(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    room = "" if memory.hbm_bytes is None else f"of {size_text(memory.hbm_bytes)}, {'fits' if memory.fits else 'does not fit'}"
    tiles = [
        ("peak memory", size_text(memory.peak_bytes), room),
        ("sent in a step", size_text(plan.sent_bytes), "by one device"),
        ("FLOPs in a step", f"{count_text(plan.flops_per_device / 1e12)} TFLOP", "of one device, with recompute and bubbles"),
    ]
    if plan.step_time_ms is not None:
        rate = count_text(plan.model_flops_per_device / plan.step_time_ms / 1e9)
        tiles.insert(0, ("predicted step", f"{plan.step_time_ms:,.1f} ms", f"{rate} TFLOP/s of the model"))
    for name, value, note in tiles:
        state = " bad" if memory.fits is False and name == "peak memory" else ""
        yield f'<div class="tile{state}"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'


def _mesh(plan: Plan) -> str:
    """The mesh as rows of boxes, a box for each device: the last axis along a row, the others down the rows."""
    # A mesh on which every axis has the size 1 is drawn as one device.
    axes = [(axis, size) for axis, size in plan.mesh.items() if size > 1] or [("device", 1)]
    *outer, (inner, columns) = axes
    # Whole rows only, at least one.
    shown = max(_MOST_DRAWN // columns, 1)
    rows = list(itertools.islice(itertools.product(*(range(size) for _, size in outer)), shown))
    lines: list[str] = []
    for row in rows:
        label = " ".join(f"{axis} {place}" for (axis, _), place in zip(outer, row, strict=True))
        cells = "".join(f'<i title="{_text(f"{label} {inner} {n}".strip())}"></i>' for n in range(min(columns, _MOST_DRAWN)))
        lines.append(f"<tr><th>{_text(label)}</th><td>{cells}</td></tr>")
    left = plan.devices - len(rows) * columns
    more = f"<p>and {left} more devices</p>" if left > 0 else ""
    shape = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    return f'<p>{_text(shape)} = {plan.devices} devices; along a row: {_text(inner)}</p><table class="mesh">{"".join(lines)}</table>{more}'


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
        shown = f"{compute + waiting:,.2f} ms" if timed else size_text(waiting)
        bars = (("compute", compute), ("waiting", waiting))
        parts = "".join(f'<i class="{kind}" style="width:{100 * value / most:.2f}%"></i>' for kind, value in bars)
        lines.append(f'<tr><th>{_text(signal)}</th><td class="bar">{parts}</td><td>{_text(shown)}</td></tr>')
    legend = '<p><i class="key compute"></i>kernels <i class="key waiting"></i>waiting for collectives</p>' if timed else ""
    return f'{legend}<table class="bars">{"".join(lines)}</table>'


_Cell = tuple[str, str | float] | str | int
"""A cell's text and its sort key; or what is both."""


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[_Cell]]) -> str:
    """A table that a click on a heading sorts. Columns of numeric keys align right."""
    cells = [[cell if isinstance(cell, tuple) else (cell, cell) for cell in row] for row in rows]
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
    return ("" if value is None else f"{value:,.2f}", value or 0.0)


def _signals(plan: Plan) -> str:
    def rows() -> Iterator[list[_Cell]]:
        for row in plan.signals:
            over = ", ".join(f"{axes} {size_text(count)}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1]))
            parts = sorted(row.roofline_ms.items(), key=lambda i: -i[1])
            # The widest part of the roofline is what the signal is bound by, so the column sorts by it.
            roofline = (", ".join(f"{part} {ms:,.2f}" for part, ms in parts), parts[0][1] if parts else 0.0)
            sizes = [_size(n) for n in (row.parameter_bytes, row.activation_bytes, sum(row.sent.values()))]
            flops = (count_text(row.flops / 1e9) if row.flops else "", row.flops)
            yield [row.signal, "; ".join(row.specs), *sizes, over, flops, _ms(row.compute_ms), _ms(row.exposed_ms), roofline]

    columns = ["signal", "spec", "parameters", "activations", "sent", "over", "GFLOP", "ms", "exposed ms", "roofline ms"]
    return _table("signals", columns, rows())


def _collectives(plan: Plan) -> str:
    columns = ["signal", "phase", "kind", "type", "axes", "bytes", "count", "total", "source"]
    rows = (
        (c.signal, c.phase, c.kind, c.dtype, axes_text(c.axes), _size(c.bytes), c.count, _size(c.total_bytes), c.source)
        for c in plan.collectives
    )
    return _table("collectives", columns, rows)


def _memory(plan: Plan) -> str:
    memory = plan.memory
    totals = {"temporary, in total": memory.temp_bytes, "peak": memory.peak_bytes, "in the host's memory": memory.host_bytes}
    rows = [(name, name, count) for name, count in memory.groups.items()]
    rows += [(f"activations for the backward pass: {signal}", signal, count) for signal, count in memory.activations.items()]
    rows += [(name, name, count) for name, count in totals.items()]
    return _table("memory", ["memory", "size"], (((name, key), _size(count)) for name, key, count in rows))
