"""Plans of llama-1b.yaml with some keys changed, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import run_process

CONFIG = str(Path(__file__).with_name("llama-1b.yaml"))
TARGET = "h200:1x1"


def plan(overrides: Sequence[str], target: str = TARGET) -> dict[str, Any]:
    """What `jgt plan --json` says. Raises FailedError."""
    return run_process([sys.executable, "-m", "jgt", "plan", "--config", CONFIG, "--target", target, "--json", *overrides]).found
