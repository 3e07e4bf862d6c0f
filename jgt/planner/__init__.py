"""Predicts what XLA will do with a function, by signal: collectives, memory, FLOPs and time. `jgt.plan` begins here.

Read `plan.py` first: it compiles a function (`compiled.py`, for hardware in `described.py`) and calls each reader of the result once.
`layouts.py`, `flops.py` and `needs/` read the traced program; `memory.py` and `timeline.py` read XLA's. `signals.py` and `findings.py` join
both, and `speed.py` adds what a caller knows. `budget.py` and `view/` use a finished plan.

These names are what the trainer uses. They load on first use, because a budget is checked before JAX is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgt.planner.budget import Budget as Budget
    from jgt.planner.described import described_device as described_device
    from jgt.planner.plan import Advice as Advice
    from jgt.planner.speed import Workload as Workload
    from jgt.planner.view.compare import Differences as Differences
    from jgt.planner.view.lock import Lock as Lock
    from jgt.planner.view.page import write_page as write_page
    from jgt.planner.view.table import print_plan as print_plan

_OWNERS = {
    "Advice": "plan",
    "Budget": "budget",
    "Differences": "view.compare",
    "Lock": "view.lock",
    "Workload": "speed",
    "described_device": "described",
    "print_plan": "view.table",
    "write_page": "view.page",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'jgt.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jgt.planner.{_OWNERS[name]}"), name)
