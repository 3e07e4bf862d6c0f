"""The files that a run writes about itself: metrics.jsonl, events.jsonl, experts.jsonl, and the metrics of its other loggers.

A run can be killed at any moment, so every record is appended and the file closed at once: a killed process loses at most the record that
it was writing. Each file is a sink (`sink.py`): a record that cannot be written is lost as a whole, and the run continues. Readers skip
lines that are not valid JSON.

Metrics and events have different histories. A restart trains the steps after its checkpoint again, so their metrics are dropped and written
once more: metrics.jsonl has each step once. Events are what really happened, including the lost steps, and are never dropped. Process 0
writes everything; each other process writes only its events, into another file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..files.streams import say
from ..journal.rows import LOADS
from ..journal.sink import AppendedFile, Sink
from ..journal.status import events_file, left_open
from ..journal.timeline import OTHER, Timeline
from ..settings.packages import missing_loggers
from .loggers import CsvFile, JsonLines, Logger
from .media import Histogram, Image, Medium
from .services import MlflowClient, Service, WandbClient
from .tensorboard import Board


def open_loggers(names: Sequence[str] | None, folder: Path, name: str, config: Callable[[], Mapping[str, object]]) -> list[Logger]:
    """The loggers of these names. None: TensorBoard's if it is installed. name, config: the run's, for services.

    metrics.jsonl is not among them: it is always written, because resuming, replaying and reports read it. A logger that the `log:` section
    names and that is not installed is an error before the run starts (`train.settings.packages.missing_loggers`).
    """
    make: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: Board(folder / "tensorboard"),
        "csv": lambda: CsvFile(folder / "metrics.csv", folder / "metrics.jsonl"),
        "wandb": lambda: Service("wandb", lambda: WandbClient(folder, name, config()), (Image, Histogram, str)),
        "mlflow": lambda: Service("mlflow", lambda: MlflowClient(folder, name, config()), (Image, str)),
    }
    chosen = names if names is not None else () if missing_loggers(("tensorboard",)) else ("tensorboard",)
    return [make[logger]() for logger in dict.fromkeys(chosen) if logger in make]


class Records:
    """Writes the records of one process into the run directory. No method raises an error of the disk.

    loggers: they get the metrics too; only process 0 has any. begun: when the first phase began, `open`, in seconds since 1970.
    """

    def __init__(self, folder: Path, *, process: int = 0, loggers: Sequence[Logger] = (), begun: float | None = None):
        # The metrics are the same on all processes.
        self._loggers = [] if process else [JsonLines(folder / "metrics.jsonl"), *loggers]
        self._unseen: set[type] = set()
        self._loads = [] if process else [JsonLines(folder / LOADS)]
        events = events_file(folder, process)
        self._events = Sink(events.name, AppendedFile(events).write)
        if (left := left_open(folder, process)) is not None:
            self._put({**left, "killed": True})
        self.timeline = Timeline(self._put, OTHER if begun is None else "open", begun)
        self._sample = Sink("sample.txt", lambda text: (folder / "sample.txt").write_bytes(text.encode()))

    @property
    def lost(self) -> dict[str, int]:
        """The number of lost records of each sink that lost any."""
        metrics, others = self._loggers[:1], (*self._loggers[1:], *self._loads)
        sinks = *(logger.sink for logger in metrics), self._events, self._sample, *(logger.sink for logger in others)
        return {sink.name: sink.lost for sink in sinks if sink.lost}

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the metrics of a step to metrics.jsonl and to all loggers."""
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        for logger in self._loggers:
            logger.add(step, plain)

    def medium(self, step: int, name: str, value: Medium) -> None:
        """Adds an image, a histogram or a text to all loggers that show such. Says once if there is none."""
        shown = [logger for logger in self._loggers if type(value) in logger.takes]
        for logger in shown:
            logger.add_medium(step, name, value)
        if self._loggers and not shown and type(value) not in self._unseen:
            self._unseen.add(type(value))
            kind = {Image: "an image", Histogram: "a histogram", str: "a text"}[type(value)]
            say(f"no logger of this run shows {kind} such as {name}. Add tensorboard or wandb to log:")

    def alert(self, kind: str, message: str) -> None:
        """Tells a person something that no metric shows, if the run has alerts."""
        for logger in self._loggers:
            logger.alert(kind, message)

    def loads(self, step: int, loads: Sequence[Sequence[float]]) -> None:
        """Appends the load of each expert, by layer, to experts.jsonl."""
        for logger in self._loads:
            logger.add(step, {"load": [[round(x, 3) if math.isfinite(x) else None for x in layer] for layer in loads]})

    def phase(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Appends an event with the seconds that the phase inside took, such as init, compile, save or restore."""
        if name == "save" and self._loggers:
            self.timeline.figures.setdefault("saving", {"step": details.get("step"), "since": time.time()})
        return self.timeline.phase(name, **details)

    def wrote(self, step: int) -> None:
        """A save, which began with a phase of its own, is on disk. Called by the thread that has written it."""
        if (saving := self.timeline.figures.pop("saving", None)) is not None:
            self.event("write", saving["since"], time.time() - saving["since"], step=step)

    def event(self, name: str, started: float, seconds: float, **details: object) -> None:
        """Appends an event that is not a phase of its own. started: seconds since 1970."""
        if name == "save_failed":
            self.timeline.figures.pop("saving", None)
        self._put({"phase": name, "time": round(started, 6), "seconds": round(seconds, 6), **details})

    def stop(self, **details: object) -> None:
        """Ends the last phase, and appends the event `stop`."""
        self.timeline.end()
        self.timeline.figures["end"] = details.get("why")
        self.event("stop", time.time(), 0.0, **details)

    def _put(self, row: Mapping[str, object]) -> None:
        self._events.put(json.dumps(row).encode() + b"\n")

    def sample(self, text: str) -> None:
        """Writes sample.txt; process 0 only."""
        if self._loggers:
            self._sample.put(text)

    def forget_after(self, step: int) -> None:
        """Drops the metrics of later steps than the one that a restart resumes from: they will be written again."""
        for logger in (*self._loggers, *self._loads):
            logger.forget_after(step)

    def close(self) -> None:
        """No more metrics will come. Waits for services, but not for ever."""
        for logger in self._loggers:
            logger.close()
