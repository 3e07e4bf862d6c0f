"""Bars of characters: a length in eighths of a cell, which any terminal and any log file shows."""

from __future__ import annotations

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> str:
    """A bar for a share of the width: 1 fills it. Anything above 0 shows at least an eighth of a cell."""
    eighths = max(round(min(share, 1.0) * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def gauge(share: float, limit: float, width: int) -> str:
    """A bar that ends at a limit, `|`: dots fill what is left, and a bar that is too long crosses it. limit: as a share of the width."""
    filled, end = bar(share, width), round(limit * width)
    return f"{filled:·<{end}}|" if len(filled) <= end else f"{filled[:end]}|{filled[end:]}"
