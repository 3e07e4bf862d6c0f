"""Runs the trainer until its first step is logged: `python -m benchmarks.first_step --config FILE [key.sub=value ...]`."""

from __future__ import annotations

import os
import sys
from typing import Any

from train.__main__ import main as run
from train.records.records import Records


def _end(*_: Any) -> None:
    os._exit(0)


def main() -> None:
    """Runs the complete trainer up to its first line of metrics, and exits there."""
    Records.metrics = _end
    sys.exit(run([*sys.argv[1:], "train.steps=1"]))


if __name__ == "__main__":
    main()
