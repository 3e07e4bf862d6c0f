"""A plan as one self-contained HTML page: totals, the mesh drawn, a bar and a row for each signal, all collectives."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from jgt.plan.advice import largest_costs
from jgt.plan.plan import Plan
from jgt.plan.units import axes_text, count_text, size_text

_MOST_DRAWN = 64
"""Devices that the drawing of a mesh shows; of more, the corner."""
_MOST_ON_A_LINE = 24
"""Characters of a cell that is not broken into lines."""


def write_page(plan: Plan, path: Path) -> None:
    """Writes the page; it loads nothing from anywhere."""
    path.write_text(page(plan), encoding="utf-8")


def page(plan: Plan) -> str:
    """The page's text."""
    style, script = (resources.files("jgt.plan").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = f"jgt plan: {plan.target}, {plan.devices} devices"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<div class="tiles">{"".join(_tiles(plan))}</div>',
        _section("Mesh", _mesh(plan)),
        _section("Time by signal" if plan.step_time_ms is not None else "Bytes sent by signal", _bars(plan)),
        _section("Signals", _signals(plan)),
        _section("To look at", _list(plan.warnings)) if plan.findings else "",
        _section("The three largest costs", _list([line.partition(" ")[2] for line in largest_costs(plan)], "ol")),
        _section("Memory of one device", _memory(plan)),
        _section("Collectives", _collectives(plan)),
        _section("How it was counted", _list(plan.assumptions)),
    ]
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
    tiles = [("peak memory", size_text(memory.peak_bytes), room), ("sent in a step", size_text(plan.sent_bytes), "by one device")]
    tiles.append(("FLOPs in a step", f"{count_text(plan.flops_per_device / 1e12)} TFLOP", "of one device, recompute and bubbles included"))
    if plan.step_time_ms is not None:
        tiles.insert(0, ("predicted step", f"{plan.step_time_ms:,.1f} ms", f"{count_text(plan.model_flops_per_device / plan.step_time_ms / 1e9)} TFLOP/s of the model"))
    for name, value, note in tiles:
        state = " bad" if memory.fits is False and name == "peak memory" else ""
        yield f'<div class="tile{state}"><span>{_text(name)}</span><b>{_text(value)}</b><small>{_text(note)}</small></div>'


def _mesh(plan: Plan) -> str:
    """The mesh as nested boxes: the innermost axis along a line, the others around it."""
    axes = [(axis, size) for axis, size in plan.mesh.items() if size > 1] or [("device", 1)]
    *outer, (inner, columns) = axes
    shown = max(_MOST_DRAWN // columns, 1)
    rows = list(itertools.islice(itertools.product(*(range(size) for _, size in outer)), shown))
    lines = []
    for row in rows:
        label = " ".join(f"{axis} {place}" for (axis, _), place in zip(outer, row, strict=True))
        cells = "".join(f'<i title="{_text(f"{label} {inner} {n}".strip())}"></i>' for n in range(min(columns, _MOST_DRAWN)))
        lines.append(f"<tr><th>{_text(label)}</th><td>{cells}</td></tr>")
    left = plan.devices - len(rows) * columns
    more = f"<p>and {left} more devices</p>" if left > 0 else ""
    shape = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    return f'<p>{_text(shape)} = {plan.devices} devices; along a line: {_text(inner)}</p><table class="mesh">{"".join(lines)}</table>{more}'


def _bars(plan: Plan) -> str:
    timed = plan.step_time_ms is not None
    values = [(row.signal, (row.compute_ms or 0.0, row.exposed_ms or 0.0) if timed else (0.0, float(sum(row.sent.values())))) for row in plan.signals]
    most = max((sum(parts) for _, parts in values), default=0.0) or 1.0
    lines = []
    for signal, (compute, waiting) in sorted(values, key=lambda item: -sum(item[1])):
        shown = f"{compute + waiting:,.2f} ms" if timed else size_text(waiting)
        parts = f'<i class="compute" style="width:{100 * compute / most:.2f}%"></i><i class="waiting" style="width:{100 * waiting / most:.2f}%"></i>'
        lines.append(f'<tr><th>{_text(signal)}</th><td class="bar">{parts}</td><td>{_text(shown)}</td></tr>')
    legend = '<p><i class="key compute"></i>kernels <i class="key waiting"></i>waiting for collectives</p>' if timed else ""
    return f'{legend}<table class="bars">{"".join(lines)}</table>'


def _table(name: str, columns: Sequence[str], rows: Iterator[list[tuple[object, object]]]) -> str:
    """A table that a click on a column sorts; each cell is (what is shown, what is sorted by)."""
    cells = list(rows)
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
    def rows() -> Iterator[list[tuple[object, object]]]:
        for row in plan.signals:
            specs = "; ".join(row.specs)
            over = ", ".join(f"{axes} {size_text(count)}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1]))
            flops = (count_text(row.flops / 1e9) if row.flops else "", row.flops)
            sizes = [_size(n) for n in (row.parameter_bytes, row.activation_bytes, sum(row.sent.values()))]
            parts = sorted(row.roofline_ms.items(), key=lambda i: -i[1])
            roofline = (", ".join(f"{part} {ms:,.2f}" for part, ms in parts), parts[0][1] if parts else 0.0)
            yield [(row.signal, row.signal), (specs, specs), *sizes, (over, over), flops, _ms(row.compute_ms), _ms(row.exposed_ms), roofline]

    return _table("signals", ["signal", "spec", "parameters", "kept", "sent", "over", "GFLOP", "ms", "exposed ms", "roofline ms"], rows())


def _collectives(plan: Plan) -> str:
    def rows() -> Iterator[list[tuple[object, object]]]:
        for c in plan.collectives:
            texts = [(x, x) for x in (c.signal, c.phase, c.kind, c.dtype, axes_text(c.axes))]
            yield [*texts, _size(c.bytes), (c.count, c.count), _size(c.total_bytes), (c.source, c.source)]

    return _table("collectives", ["signal", "phase", "kind", "type", "axes", "bytes", "times", "in all", "source"], rows())


def _memory(plan: Plan) -> str:
    def rows() -> Iterator[list[tuple[object, object]]]:
        memory = plan.memory
        for name, count in memory.groups.items():
            yield [(name, name), _size(count)]
        for signal, count in memory.activations.items():
            yield [(f"kept for the backward pass: {signal}", signal), _size(count)]
        for name, count in (("temporary, all of it", memory.temp_bytes), ("peak", memory.peak_bytes), ("in the host's memory", memory.host_bytes)):
            yield [(name, name), _size(count)]

    return _table("memory", ["what", "bytes"], rows())
