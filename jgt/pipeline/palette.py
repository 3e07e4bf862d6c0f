"""Colours of a timeline: one for each kind of item, a shade for each chunk of a stage."""

from __future__ import annotations

from jgt.pipeline.schedule import Kind

Colour = tuple[int, int, int]
"""Red, green, blue, 0 to 255."""

# Told apart by those who don't see red and green (Okabe and Ito, 2008).
_BASE: dict[Kind, Colour] = {"F": (0, 114, 178), "B": (213, 94, 0), "W": (0, 158, 115)}


def shade(kind: Kind, local_chunk: int, virtual: int) -> Colour:
    """The colour of an item: the first chunk of a stage is dark, the last is light."""
    white = 0.6 * local_chunk / max(1, virtual - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in _BASE[kind])
    return red, green, blue


def ink(colour: Colour) -> Colour:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = colour
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)
