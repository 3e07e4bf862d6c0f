"""A plan as a text contract: a line for each signal and kind of collective, compared line by line."""

from __future__ import annotations

import collections
import difflib
from pathlib import Path

from jgt.document import InputError
from jgt.plan.plan import Plan
from jgt.plan.units import axes_text

HEADER = "jgt plan lock 1"


def lock_text(plan: Plan) -> str:
    """The contract. Sources, phases and times are left out: a refactoring moves lines, and a new XLA schedules anew."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    lines = [HEADER, "# signal  kind  dtype  axes  count  bytes that a device sends", f"target {plan.target}", f"mesh {mesh}"]
    lines += [f"memory {name} {count}" for name, count in sorted(plan.memory.groups.items())]
    lines.append(f"flops {plan.flops_per_device:.0f}")
    found: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for one in plan.collectives:
        key = (one.signal, one.kind, one.dtype, axes_text(one.axes))
        found[key] += one.total_bytes
        counts[key] += one.count
    lines += ["  ".join(key) + f"  {counts[key]}  {found[key]}" for key in sorted(found)]
    return "\n".join(lines) + "\n"


def write_lock(plan: Plan, path: Path) -> None:
    """Writes the contract."""
    path.write_text(lock_text(plan), encoding="utf-8")


def read_lock(path: Path) -> str:
    """A contract's text. Raises InputError unless it is one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{path}: cannot be read: {error}. Write it with --lock {path}"]) from error
    first = text.partition("\n")[0].strip()
    if first != HEADER:
        raise InputError([f"{path}:1: this is no lock that jgt knows: it begins with {first[:60]!r}, not {HEADER!r}. Write it anew with --lock {path}"])
    return text


def changes(plan: Plan, locked: str) -> list[str]:
    """The lines that differ, `-` as locked and `+` as it is; none where the plan keeps the contract."""
    own, old = (_facts(text) for text in (lock_text(plan), locked))
    marked = difflib.unified_diff(old, own, lineterm="", n=0)
    return [line for line in marked if not line.startswith(("---", "+++", "@@"))]


def _facts(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
