"""Where the metrics of a run go beside metrics.jsonl: the loggers of the `log:` section.

metrics.jsonl is always written, because resuming, replaying and reports read it. Each further logger gets the same rows. A logger has a
sink (`train.sink`), so that whatever happens to it costs rows and never the run: rows are counted as lost, and each row is a new attempt.

Without a `log:` section TensorBoard's files are written if tensorboardX is installed; a logger that the section names and that is not
installed is an error before the run starts (`train.sections.missing_loggers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..sections import missing_loggers
from ..sink import Sink
from .csv_file import CsvFile
from .services import MlflowClient, Service, WandbClient
from .tensorboard import Board


class Logger(Protocol):
    """A place that gets the metrics of process 0."""

    sink: Sink

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the metrics of a step: numbers, or None for what is not known."""
        ...

    def forget_after(self, step: int) -> None:
        """This start resumes from `step`, and trains later steps again."""
        ...

    def close(self) -> None:
        """No more metrics will come."""
        ...


def open_loggers(names: Sequence[str] | None, folder: Path, name: str, config: Callable[[], Mapping[str, Any]]) -> list[Logger]:
    """The loggers of these names. None: TensorBoard's if it is installed. name, config: of the run, for services."""
    make: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: Board(folder / "tensorboard"),
        "csv": lambda: CsvFile(folder / "metrics.csv", folder / "metrics.jsonl"),
        "wandb": lambda: Service("wandb", lambda: WandbClient(folder, name, config())),
        "mlflow": lambda: Service("mlflow", lambda: MlflowClient(folder, name, config())),
    }
    chosen = names if names is not None else () if missing_loggers(("tensorboard",)) else ("tensorboard",)
    return [make[logger]() for logger in dict.fromkeys(chosen) if logger in make]
