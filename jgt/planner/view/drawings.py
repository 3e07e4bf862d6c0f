"""What the page of a plan draws: the mesh by hosts, the time and the memory as bars, and the step over time.

The drawings are HTML and CSS with widths in percent. So they are sharp at any size, fill the window, and can be read in the source.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jgt.console import size_text, time_text
from jgt.planner.plan import Plan
from jgt.planner.step.spans import Panel, Span
from jgt.planner.view.table import memory_rows, time_rows

_MOST_HOSTS = 16
"""The most hosts that the drawing of a mesh shows: the first ones of a larger mesh."""
_NAMED = 7.0
"""The percentage of a panel from which a span has room for its name."""
_SMALLEST = 0.1
"""Parts of a bar below this percentage are left out: they would be invisible."""


def mesh_drawing(plan: Plan) -> str:
    """The mesh as a box for each host, in which a box for each device says where on the mesh it is."""
    axes = [(axis, size) for axis, size in plan.mesh.items() if size > 1] or [("device", 1)]
    hosts: dict[int, list[tuple[int, ...]]] = {}
    for host, place in zip(plan.hosts, itertools.product(*(range(size) for _, size in axes)), strict=True):
        hosts.setdefault(host, []).append(place)
    boxes: list[str] = []
    for host, places in sorted(hosts.items())[:_MOST_HOSTS]:
        # The axes along which the devices of a host differ are inside it; the others have one place for the whole host.
        fixed = [f"{axis} {places[0][n]}" for n, (axis, _) in enumerate(axes) if len({place[n] for place in places}) == 1]
        names = [" ".join(f"{axis} {place}" for (axis, _), place in zip(axes, one, strict=True)) for one in places]
        cells = "".join(f'<i title="{_text(name)}"></i>' for name in names)
        boxes.append(f'<div class="host"><span>host {host}</span><div>{cells}</div><small>{_text(", ".join(fixed))}</small></div>')
    inside = [axis for n, (axis, _) in enumerate(axes) if any(len({place[n] for place in places}) > 1 for places in hosts.values())]
    shape = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    left = len(hosts) - len(boxes)
    more = f"<p>and {left} more hosts</p>" if left else ""
    within = f"; inside a host: {', '.join(inside)}" if inside else ""
    return f'<p>{_text(f"{shape} = {plan.devices} devices{within}")}</p><div class="hosts">{"".join(boxes)}</div>{more}'


def time_drawing(plan: Plan) -> str:
    """What the step's time is spent on, as one bar; empty if it has no time, or one that means nothing."""
    if plan.step_time_ms is None or plan.step_time_caveat:
        return ""
    return _stacked([(name, ms, time_text(ms / 1e3)) for name, ms in time_rows(plan)], plan.step_time_ms)


def memory_drawing(plan: Plan) -> str:
    """What the memory of a device has, as one bar that ends at its limit."""
    memory = plan.memory
    # Gradients and activations are parts of the temporary buffers, and what is on the host is not on the device.
    rows = [(name, count) for name, count in memory_rows(plan) if name in (*memory.groups, "temporary: activations, gradients, buffers")]
    limit = memory.hbm_bytes or memory.peak_bytes
    # XLA reuses the buffers of arguments, so the parts may be more than the peak.
    scale = memory.peak_bytes / max(sum(count for _, count in rows), 1)
    whole = max(limit, memory.peak_bytes, 1)
    mark = f'<b style="left:{100 * limit / whole:.2f}%"></b>' if memory.hbm_bytes else ""
    free = [("free", float(limit - memory.peak_bytes), size_text(limit - memory.peak_bytes))] if limit > memory.peak_bytes else []
    return _stacked([*((name, count * min(scale, 1.0), size_text(count)) for name, count in rows), *free], whole, mark)


def _stacked(parts: Sequence[tuple[str, float, str]], whole: float, mark: str = "") -> str:
    """A bar of parts (name, length, what the legend says), and its legend."""
    shown = [(name, 100 * length / whole, text) for name, length, text in parts]
    shown = [part for part in shown if part[1] >= _SMALLEST]
    kinds = ["free" if name == "free" else f"c{n % 12}" for n, (name, _, _) in enumerate(shown)]
    bar = "".join(
        f'<i class="{kind}" style="width:{share:.2f}%" title="{_text(f"{name}: {text}")}"></i>'
        for kind, (name, share, text) in zip(kinds, shown, strict=True)
    )
    legend = "".join(
        f'<li><i class="key {kind}"></i>{_text(name)} <b>{_text(text)}</b> <small>{share:.0f}%</small></li>'
        for kind, (name, share, text) in zip(kinds, shown, strict=True)
    )
    return f'<div class="stacked">{bar}{mark}</div><ul class="legend">{legend}</ul>'


def timeline_drawing(plan: Plan) -> str:
    """The step on the device and its links, from the whole to one trip of its innermost loop."""
    signals = list(dict.fromkeys(row.signal for row in plan.signals))
    return "".join(_panel(panel, signals) for panel in plan.timeline)


def _panel(panel: Panel, signals: Sequence[str]) -> str:
    times = f", {panel.trips:,} times" if panel.trips > 1 else ""
    lanes = "".join(
        f'<div class="lane"><span>{lane}</span><div>{"".join(_spans(panel, lane, signals))}</div></div>' for lane in ("device", "links")
    )
    return f'<div class="panel"><p>{_text(panel.title)}{times}: {time_text(panel.ms / 1e3)}</p>{lanes}</div>'


def _spans(panel: Panel, lane: str, signals: Sequence[str]) -> Iterator[str]:
    for span in panel.spans:
        if span.lane == lane:
            left, width = 100 * span.start / panel.ms, 100 * (span.end - span.start) / panel.ms
            kind = span.kind if span.kind in ("waiting", "loop") else ""
            # A signal has one colour in all panels, and waiting has its own.
            colour = "" if kind == "waiting" else f"c{signals.index(span.signal) % 12}" if span.signal in signals else "c11"
            name = _name(span)
            label = _text(name) if width > _NAMED else ""
            title = _text(f"{name}, {span.phase}: {time_text((span.end - span.start) / 1e3)}")
            classes = " ".join(filter(None, (kind, colour)))
            yield f'<i class="{classes}" style="left:{left:.2f}%;width:{width:.2f}%" title="{title}">{label}</i>'


def _name(span: Span) -> str:
    if span.kind == "loop":
        return f"{span.trips:,} x {span.signal}"
    return span.signal if span.lane == "device" and span.kind == "kernels" else f"{span.kind}: {span.signal}"


def list_of(lines: Iterable[str], kind: str = "ul") -> str:
    """A list of texts."""
    return f"<{kind}>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + f"</{kind}>"


def _text(value: object) -> str:
    return html.escape(str(value))
