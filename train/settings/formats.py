"""Counts and durations in a few characters, for lines and screens that have little room."""

from __future__ import annotations


def short_text(count: float) -> str:
    """A number in at most five characters: `999`, `12.3k`, `1.23G`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or unit == "P":
            return f"{count:.0f}" if not unit else f"{count:#.3g}".rstrip(".") + unit
        count /= 1000
    raise AssertionError


def duration_text(seconds: float, *, is_rough: bool = False) -> str:
    """A duration in at most six characters, for a hundred days: `45s`, `12m30s`, `1h02m`, `3d04h`. is_rough: `12m` for `12m30s`."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if not minutes:
        return f"{seconds:.0f}s"
    if not hours:
        return f"{minutes}m" if is_rough else f"{minutes}m{int(seconds % 60):02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"
