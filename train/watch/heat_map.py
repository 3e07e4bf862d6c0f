"""The load of experts over time as text: a heat map.

A model may have thousands of experts and a terminal has some dozens of rows. So the heat map shows one layer, the one with the least equal
loads at the end of the run, and its most and least used experts. Time runs to the right; a column is the mean over some records.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..journal.loads import NAMED, Loads

_MAX_ROWS = 16
"""The rows of a heat map."""
MARGIN = 12
"""The columns beside a heat map."""
_SHADES, _ASCII = " ░▒▓█", " .:*#"
_STEPS = (0.25, 0.75, 1.25, 2.0)
"""Where a shade ends and the next one begins."""


def describe_loads(loads: Loads, columns: int, *, is_ascii: bool = False) -> Iterator[str]:
    """The lines that a terminal shows. columns: the width of the heat map."""
    layer, first, end = loads.worst_layer, loads.fullest(0), loads.fullest(-1)
    last, order = loads.loads[-1][layer], loads.by_use(layer)
    yield f"Experts: the fullest of a layer had {first:.2f} mean loads at step {loads.steps[0]} and has {end:.2f} at step {loads.steps[-1]}"
    most, least = (", ".join(f"{e} ({last[e]:.2f})" for e in part) for part in (order[:NAMED], order[::-1][:NAMED]))
    yield f"Layer {layer} is the least equal: most used {most}; least used {least}"
    shown = order if len(order) <= _MAX_ROWS else [*order[: _MAX_ROWS // 2], *order[-_MAX_ROWS // 2 :]]
    cells, shades = loads.of_layer(layer, columns), _ASCII if is_ascii else _SHADES
    for expert in shown:
        yield f"{expert:>{MARGIN - 2}} |{''.join(shades[sum(load >= limit for limit in _STEPS)] for load in cells[expert])}"
    limits = "  ".join(f"{shade} from {limit:g}" for shade, limit in zip(shades[1:], _STEPS, strict=True))
    yield f"{'':>{MARGIN}}steps {loads.steps[0]} to {loads.steps[-1]}; mean loads: {limits}"
