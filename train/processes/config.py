"""The `watchdog:` section. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings.numbers import Seconds


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """The `watchdog:` section: when a process without progress is ended. It first writes where its threads are.

    step_seconds: the longest time for a step, or ten times the slowest step of this start if that is longer. The first steps of a start use
    `start_seconds`.
    start_seconds: the longest time for any other phase: init, restore, compile, eval, save. Reading the data has no limit.
    peer_seconds: the longest time without a sign of life from another process.
    join_seconds: how long the processes wait for each other at a start. null: 300, and 30 under the
    [launcher](reliability.md#the-launcher).
    """

    step_seconds: Seconds = 60.0
    start_seconds: Seconds = 1800.0
    peer_seconds: Seconds = 30.0
    join_seconds: Seconds | None = None
