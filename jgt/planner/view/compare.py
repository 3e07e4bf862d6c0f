"""A plan compared with another one: with a lock that was written earlier, or side by side.

A change of a rule, of a model or of XLA can change what a step sends, and nothing fails. A lock makes it fail: a text file in the
repository with a line for each signal, kind of collective, type and axes. It contains only what a person would want to decide on. Lines
of the program, phases and times are left out, because a refactoring moves lines and a new XLA schedules differently.

Invariant: two plans of the same program have the same lock, so `--check` is silent unless something is sent, stored or computed
differently.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Iterator
from pathlib import Path

from jgt.console import axes_text, count_text, make_console, make_table, size_text
from jgt.document import InputError
from jgt.planner.plan import Plan

HEADER = "jgt plan lock 1"
"""The first line of a lock. Its number changes with the format."""


def lock_text(plan: Plan) -> str:
    """The lock of a plan."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    lines = [HEADER, "# signal  kind  dtype  axes  count  bytes that a device sends", f"target {plan.target}", f"mesh {mesh}"]
    lines += [f"memory {name} {count}" for name, count in sorted(plan.memory.groups.items())]
    lines.append(f"flops {plan.flops_per_device:.0f}")
    # A signal may send the same kind from several lines of the program and in several phases: the lock adds them up.
    sent: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for c in plan.collectives:
        key = (c.signal, c.kind, c.dtype, axes_text(c.axes))
        sent[key] += c.total_bytes
        counts[key] += c.count
    lines += ["  ".join(key) + f"  {counts[key]}  {sent[key]}" for key in sorted(sent)]
    return "\n".join(lines) + "\n"


def write_lock(plan: Plan, path: Path) -> None:
    """Writes the lock of a plan."""
    path.write_text(lock_text(plan), encoding="utf-8")


def read_lock(path: Path) -> str:
    """The text of a lock. Raises InputError if the file cannot be read or is not a lock."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{path}: cannot be read: {error}. Write it with --lock {path}"]) from error
    first = text.partition("\n")[0].strip()
    if first != HEADER:
        raise InputError(
            [
                f"{path}:1: not a lock that this version of jgt can read: it begins with {first[:60]!r}, not {HEADER!r}. "
                f"Write it again with --lock {path}"
            ]
        )
    return text


def changes(plan: Plan, locked: str) -> list[str]:
    """The lines that differ, `-` in the lock and `+` in the plan; none if the plan keeps the lock."""
    # A person may add comments and blank lines to a lock.
    old, new = ([x.rstrip() for x in text.splitlines() if x.strip() and not x.startswith("#")] for text in (locked, lock_text(plan)))
    # No context (n=0): a line is printed because it changed.
    marked = difflib.unified_diff(old, new, lineterm="", n=0)
    # These three begin difflib's own headers.
    return [line for line in marked if not line.startswith(("---", "+++", "@@"))]


def differences(a: Plan, b: Plan) -> dict[str, object]:
    """The totals of both plans, and the collectives that differ, as plain values."""
    return {
        "totals": {name: {"a": x, "b": y} for name, x, y in _totals(a, b)},
        "collectives": [{"signal": s, "kind": k, "axes": axes, "a": x, "b": y} for (s, k, axes), x, y in _sent(a, b)],
        "warnings": {"a": a.warnings, "b": b.warnings},
    }


def print_differences(a: Plan, b: Plan, name_a: str, name_b: str) -> None:
    """Writes the comparison to stdout."""
    console = make_console()
    targets = a.target + (f" and {b.target}" if b.target != a.target else "")
    table = make_table(f"Totals of one device in a step, on {targets}", ["total", name_a, name_b, "change"], 1)
    for name, x, y in _totals(a, b):
        table.add_row(name, _show(name, x), _show(name, y), _change(x, y))
    console.print(table)
    rows = list(_sent(a, b))
    if rows:
        table = make_table("Collectives that differ", ["signal", "kind", "axes", name_a, name_b, "change"], 3)
        for (signal, kind, axes), x, y in rows:
            table.add_row(signal, kind, axes, size_text(x), size_text(y), _change(x, y))
        console.print(table)
    else:
        console.print("The collectives are the same.")
    # The findings that both plans share are left out.
    for name, plan, other in ((name_a, a, b), (name_b, b, a)):
        for text in plan.warnings:
            if text not in other.warnings:
                console.print(f"only {name}: {text}", soft_wrap=True)


def _totals(a: Plan, b: Plan) -> Iterator[tuple[str, float | None, float | None]]:
    yield "step_time_ms", a.step_time_ms, b.step_time_ms
    yield "peak_bytes", a.memory.peak_bytes, b.memory.peak_bytes
    yield "args_bytes", a.memory.args_bytes, b.memory.args_bytes
    yield "temp_bytes", a.memory.temp_bytes, b.memory.temp_bytes
    yield "sent_bytes", a.sent_bytes, b.sent_bytes
    yield "flops_per_device", a.flops_per_device, b.flops_per_device


def _sent(a: Plan, b: Plan) -> Iterator[tuple[tuple[str, str, str], int, int]]:
    """Bytes by signal, kind and axes where the plans differ, the largest difference first."""
    old, new = _sent_bytes(a), _sent_bytes(b)
    # A Counter answers 0 for a key that only the other plan has.
    keys = [key for key in {**old, **new} if old[key] != new[key]]
    for key in sorted(keys, key=lambda key: (-abs(new[key] - old[key]), key)):
        yield key, old[key], new[key]


def _sent_bytes(plan: Plan) -> collections.Counter[tuple[str, str, str]]:
    sent: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for c in plan.collectives:
        sent[c.signal, c.kind, axes_text(c.axes)] += c.total_bytes
    return sent


def _change(x: float | None, y: float | None) -> str:
    if x is None or y is None or x == y:
        return ""
    return f"{(y - x) / x:+.1%}" if x else "new"


def _show(name: str, x: float | None) -> str:
    """A total in the unit of its name."""
    if x is None:
        return ""
    if name == "step_time_ms":
        return f"{x:,.1f} ms"
    return f"{count_text(x / 1e12)} TFLOP" if name == "flops_per_device" else size_text(x)
