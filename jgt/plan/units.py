"""Numbers and axes as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: float) -> str:
    """Three digits, thousands set apart."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:.3g}"


def axes_text(axes: Sequence[str]) -> str:
    """Mesh axes in a word."""
    return "+".join(axes) or "(none)"
