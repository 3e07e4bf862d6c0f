"""The clock of a training process that `peers.py` launched. Needs only Python, because every peer has its own environment."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any


class StepClock:
    """The CPU-seconds of this process and the time, at the end of each step."""

    def __init__(self):
        self._ends: list[tuple[float, float]] = []

    def tick(self) -> int:
        """Records that a step has ended, with its results computed. Returns its number, from 1."""
        self._ends.append((time.process_time(), time.time()))
        return len(self._ends)

    def found(self) -> dict[str, Any]:
        """first: CPU-seconds and seconds from launch to the end of the first step. cpu_s and s: those of each later step."""
        cpu_s, s = ([b - a for a, b in itertools.pairwise(of)] for of in zip(*self._ends, strict=True))
        cpu, end = self._ends[0]
        return {"first": {"cpu_s": cpu, "s": end - float(os.environ["LAUNCHED"])}, "cpu_s": cpu_s, "s": s}
