"""A plan for people: on the terminal, as a page, beside another plan, and as a lock.

A lock is a text file with a line for each signal, kind of collective, type and axes, so that a change of what a step sends is noticed. It
has no lines of the program, phases and times, because a refactoring moves lines and a new XLA schedules differently.
"""

from __future__ import annotations

import collections
import difflib
import io
from dataclasses import dataclass
from pathlib import Path

from jgt.command.console import axes_text
from jgt.document import InputError
from jgt.planner.plan import Plan
from jgt.planner.view.compare import Differences
from jgt.planner.view.page import page
from jgt.planner.view.table import print_plan

HEADER = "jgt plan lock 1"
"""The first line of a lock. Its number changes with the format."""


@dataclass(frozen=True)
class Report:
    """A plan as people read it: on the terminal, as a page, or as a lock."""

    plan: Plan

    def print(self) -> None:
        """Writes the plan to stdout."""
        print_plan(self.plan)

    @property
    def text(self) -> str:
        """The plan as a terminal shows it that is as wide as the tables."""
        file = io.StringIO()
        print_plan(self.plan, file)
        return file.getvalue()

    def write_page(self, path: Path) -> None:
        """Writes the plan as an HTML page."""
        path.write_text(page(self.plan), encoding="utf-8")

    def compare(self, other: Plan) -> Differences:
        """The plan beside another one."""
        return Differences(self.plan, other)

    @property
    def lock(self) -> str:
        """The text of the plan's lock."""
        plan = self.plan
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

    @staticmethod
    def read_lock(path: Path) -> str:
        """The lock in a file. Raises InputError if the file cannot be read or is not a lock."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError([f"{path}: cannot be read: {error}. Write it with --lock {path}"]) from error
        first = text.partition("\n")[0].strip()
        if first != HEADER:
            begins = f"it begins with {first[:60]!r}, not {HEADER!r}"
            remedy = f"Write it again with --lock {path}"
            raise InputError([f"{path}:1: not a lock that this version of jgt can read: {begins}. {remedy}"])
        return text

    def changes(self, lock: str) -> list[str]:
        """The lines that differ, `-` in a lock and `+` in the plan; none if the plan keeps the lock."""
        # A person may add comments and blank lines to a lock.
        old, new = ([x.rstrip() for x in text.splitlines() if x.strip() and not x.startswith("#")] for text in (lock, self.lock))
        # No context (n=0): a line is printed because it changed.
        marked = difflib.unified_diff(old, new, lineterm="", n=0)
        # These three begin difflib's own headers.
        return [line for line in marked if not line.startswith(("---", "+++", "@@"))]
