"""The line of a logged step: as many of its metrics as fit the width of the screen.

Steps, loss, tokens, speed, memory, MFU and the time left are what a person looks for, and fit 80 columns even for long runs. Whatever else
is logged is shown while there is room, in this order: metrics that the loss returns, grad_norm, lr, the time of a step, and the epoch. Room
is counted for what a line will have later, too: the first steps have no speed yet, and columns should not come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_GAP = 2
_SPEEDS = ("tokens_per_s", "samples_per_s")
_NOT_SHOWN = (*_SPEEDS, "tokens", "samples", "memory_bytes", "memory_peak_bytes", "memory_limit_bytes", "time", "step")
"""Metrics that are part of another column, or of no interest in a line."""
_PART = "eval_loss/"
"""What the loss on one part of a mixture begins with."""
_SPEED, _MFU, _TIME_LEFT = 7, 7, 10
"""The widths of columns that the first lines lack."""


def step_line(step: int, total: int, metrics: Mapping[str, Any], width: int) -> str:
    """The line of a step: `step  30/300  loss 2.4513   123k tok  27.3k/s  31/80 GB  mfu 41%  eta 12m30s`.

    metrics: the logged metrics by name, with `eta_s`. None and what is not a number are left out. The line is longer than `width` only if
    step and loss alone are.
    """
    known = {name: value for name, value in metrics.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    head = [f"step {step:>{len(str(total))}}/{total}", *_named(known, "loss", "eval_loss")]
    main = list(filter(None, [_amount(known), _speed(known), _memory(known), *_named(known, "mfu", "eta_s")]))
    others = [name for name in known if name not in (*_NOT_SHOWN, *_ESSENTIAL, *_LAST)]
    extra: list[str] = []
    for text in _named(known, *others, *_LAST):
        if len(_joined([*head, *extra, text, *main])) + _reserved(known) > width:
            break
        extra.append(text)
    parts = [*head, *extra, *main]
    # The last columns count least.
    while len(parts) > len(head) and len(_joined(parts, gap=1)) > width:
        parts.pop()
    return _joined(parts, gap=_GAP if len(_joined(parts)) <= width else 1)


def _joined(parts: list[str], gap: int = _GAP) -> str:
    return (" " * gap).join(parts)


def _reserved(known: Mapping[str, float]) -> int:
    """The columns that this line lacks, and others have."""
    if "eval_loss" in known:
        return 0
    has_speed = any(name in known for name in _SPEEDS)
    # Whether there is an MFU is known with the speed. Devices with memory statistics are likely to have one.
    missing = [(not has_speed, _SPEED), (not has_speed and "memory_bytes" in known, _MFU), ("eta_s" not in known, _TIME_LEFT)]
    return sum(width + _GAP for is_missing, width in missing if is_missing)


def _named(known: Mapping[str, float], *names: str) -> list[str]:
    return [_text(name, known[name]) for name in names if name in known]


def _amount(known: Mapping[str, float]) -> str | None:
    if "tokens" in known:
        return f"{short_text(known['tokens']):>5} tok"
    return f"{short_text(known['samples']):>5} samples" if "samples" in known else None


def _speed(known: Mapping[str, float]) -> str | None:
    speed = known.get("tokens_per_s", known.get("samples_per_s"))
    return None if speed is None else f"{short_text(speed):>5}/s"


def _memory(known: Mapping[str, float]) -> str | None:
    used, limit = known.get("memory_peak_bytes", known.get("memory_bytes")), known.get("memory_limit_bytes")
    if used is None:
        return None
    digits = 1 if max(used, limit or 0) < 10e9 else 0
    return f"{used / 1e9:.{digits}f}{'' if limit is None else f'/{limit / 1e9:.{digits}f}'} GB"


def _text(name: str, value: float) -> str:
    if name.startswith(_PART):
        # Beside the loss of all parts, the name of one is enough.
        return f"{name.removeprefix(_PART)} {value:.4f}"
    return _LAST.get(name, _ESSENTIAL.get(name, lambda v: f"{name} {f'{v:#.4g}'.rstrip('.')}"))(value)


_ESSENTIAL: Mapping[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "eval_loss": lambda value: f"eval_loss {value:.4f}",
    "mfu": lambda value: f"mfu {value:>3.0%}",
    "eta_s": lambda value: f"eta {duration_text(value):>6}",
}
_LAST: Mapping[str, Callable[[float], str]] = {
    "grad_norm": lambda value: f"grad_norm {value:.4f}",
    "lr": lambda value: f"lr {value:.2e}",
    "step_time_s": lambda value: f"{value * 1000:.0f} ms",
    "epoch": lambda value: f"epoch {value:.2f}",
}


def short_text(count: float) -> str:
    """A number in at most five characters: `999`, `12.3k`, `1.23G`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5 or unit == "P":
            return f"{count:.0f}" if not unit else f"{count:#.3g}".rstrip(".") + unit
        count /= 1000
    raise AssertionError


def duration_text(seconds: float) -> str:
    """A duration in at most six characters, for a hundred days: `45s`, `12m30s`, `1h02m`, `3d04h`."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if not minutes:
        return f"{seconds:.0f}s"
    if not hours:
        return f"{minutes}m{int(seconds % 60):02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"
