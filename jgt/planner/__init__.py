"""Predicts what XLA will do with a function, by signal: collectives, memory, FLOPs and time. `jgt.plan` begins here.

Read `plan.py` first: it compiles a function (`compiled.py`, for hardware in `described.py`) and calls each reader of the result once.
`layouts.py`, `flops.py` and `needs/` read the traced program; `memory.py` and `timeline.py` read XLA's. `signals.py` and `findings.py` join
both, `speed.py` adds what a caller knows, and `assumptions.py` says how a plan counts. `budget.py` and `view/` use a
finished plan. `profile/` measures what a plan predicts.

These names are what the trainer uses. They load on first use, because a run's file is checked before JAX is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgt.planner.budget import Budget as Budget
    from jgt.planner.described import described_device as described_device
    from jgt.planner.hardware.chip import Chip as Chip
    from jgt.planner.hardware.chip import Link as Link
    from jgt.planner.hardware.rates import MatmulWork as MatmulWork
    from jgt.planner.hardware.target import Target as Target
    from jgt.planner.hlo.custom_calls import has_foreign_mask as has_foreign_mask
    from jgt.planner.profile.device_time import Profile as Profile
    from jgt.planner.speed import Workload as Workload
    from jgt.planner.view.report import Report as Report

_OWNERS = {
    "Budget": "budget",
    "Chip": "hardware.chip",
    "Link": "hardware.chip",
    "MatmulWork": "hardware.rates",
    "Profile": "profile.device_time",
    "Report": "view.report",
    "Target": "hardware.target",
    "Workload": "speed",
    "described_device": "described",
    "has_foreign_mask": "hlo.custom_calls",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module 'jgt.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jgt.planner.{_OWNERS[name]}"), name)
