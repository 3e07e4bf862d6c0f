"""Metrics for TensorBoard, with the extra `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None


class TensorBoard:
    """Writes numbers as scalars."""

    def __init__(self, writer: Any):
        self._writer = writer

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Writes the values that are numbers."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes."""
        self._writer.close()


def open_board(folder: Path) -> TensorBoard | None:
    """A board that writes to a folder; None where tensorboardX is not installed."""
    return None if SummaryWriter is None else TensorBoard(SummaryWriter(str(folder)))
