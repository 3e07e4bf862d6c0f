"""Metrics for TensorBoard, with the extra `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes numbers as scalars. Made only where tensorboardX is installed."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter  # noqa: PLC0415 - optional

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Writes the values that are numbers."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes."""
        self._writer.close()
