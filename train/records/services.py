"""Tracking services as loggers: Weights & Biases and MLflow.

A service is somewhere else: its client may wait for a network, ask for a key, or raise anything. So all calls happen in another thread, and
training only puts rows into a queue of limited length. A call that fails costs its row, and the next row is a new attempt. At the end of
the run the thread gets some time to send what is left.

All starts of a run are one run of the service: its id there is stored in the run directory. Steps that the service has already are not sent
again when a restart trains them again. The clients take their addresses and keys from the environment (`WANDB_...`, `MLFLOW_...`), and
never from a config, which may be shared.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..files.disk import write_whole
from ..files.json_text import read_object
from ..files.streams import say
from ..journal.rows import flattened
from ..journal.sink import Sink
from .loggers import Logger
from .media import Histogram, Image, Medium

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for rows that are not sent yet."""
_PROJECT = "jgt"
_WAITING_ROWS, _WAITING_MEDIA = 10_000, 200
"""The most that wait to be sent. An image is as large as a thousand rows."""
_MAX_PARAMETER = 500
# Each service has a thread.
_IDS_LOCK = threading.Lock()


class Service(Logger):
    """A logger that sends rows in another thread. connect: opens the connection; it is called again after it has failed.

    The methods of a connection may take long and may raise anything.
    """

    def __init__(self, name: str, connect: Callable[[], WandbClient | MlflowClient], takes: tuple[type, ...] = ()):
        self.takes = takes
        super().__init__(Sink(name, self._send))
        self._connect = connect
        self._client: WandbClient | MlflowClient | None = None
        # Each item calls the client. None: no more will come.
        self._rows: queue.Queue[Callable[[WandbClient | MlflowClient], None] | None] = queue.Queue(_WAITING_ROWS)
        # A daemon: a service that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the metrics of a step to what is to be sent."""
        row = {name: float(value) for name, value in values.items() if isinstance(value, int | float) and name != "time"}
        self.sink.attempt(lambda: self._enqueue(lambda client: client.log(step, row), _WAITING_ROWS))

    def add_medium(self, step: int, name: str, value: Medium) -> None:
        """Adds an image, a histogram or a text to what is to be sent."""
        self.sink.attempt(lambda: self._enqueue(lambda client: client.log_medium(step, name, value), _WAITING_MEDIA))

    def close(self) -> None:
        """Waits a while until everything is sent. Rows that are not are lost."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            say(f"{self.sink.name} does not answer; the run ends without it")
            self.sink.lost += self._rows.qsize()

    def _enqueue(self, call: Callable[[WandbClient | MlflowClient], None], most: int) -> None:
        # Only this thread puts rows into the queue.
        if self._rows.qsize() >= most:
            raise OSError(f"it has not taken the last {most:,} rows")
        self._rows.put_nowait(call)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            self.sink.put(row)
        if self._client is not None:
            self.sink.put(None)

    def _send(self, row: Callable[[WandbClient | MlflowClient], None] | None) -> None:
        """Sends a row; None: ends the connection. Raises OSError, whatever the client raises, with the first line of its message."""
        try:
            if self._client is None:
                self._client = self._connect()
            if row is None:
                self._client.finish()
            else:
                row(self._client)
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error


class WandbClient:
    """A run of Weights & Biases, https://docs.wandb.ai/ref/python. It reads WANDB_PROJECT, WANDB_MODE and other variables itself."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, object]):
        # Imported here, because it takes seconds, and only runs that log to it pay for it.
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=_ids(folder).get("wandb"),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            # It would print among the step lines, and record the screen.
            settings={"silent": True, "console": "off"},
        )
        _write_id(folder, "wandb", self._run.id)
        self._last = int(self._run.summary.get("_step", 0) or 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step. wandb itself puts those of one step together."""
        if step >= self._last:
            self._run.log(dict(values), step=step)

    def log_medium(self, step: int, name: str, value: Medium) -> None:
        """Sends an image, a histogram or a text."""
        wandb = importlib.import_module("wandb")
        if isinstance(value, Image):
            shown = wandb.Image(value.pixels.squeeze(2) if value.pixels.shape[2] == 1 else value.pixels)
        elif isinstance(value, Histogram):
            shown = wandb.Histogram(np_histogram=(value.counts, value.edges))
        else:
            shown = wandb.Html(f"<pre>{html.escape(value)}</pre>")
        if step >= self._last:
            self._run.log({name: shown}, step=step)

    def finish(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


class MlflowClient:
    """A run of MLflow, https://mlflow.org/docs/latest/python_api. It reads MLFLOW_TRACKING_URI and other variables itself."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, object]):
        self._mlflow = importlib.import_module("mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & set(os.environ):
            self._mlflow.set_experiment(_PROJECT)
        known = _ids(folder).get("mlflow")
        run = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=name)
        _write_id(folder, "mlflow", run.info.run_id)
        # The row of a step has the step as a metric, too.
        self._last = int(run.data.metrics.get("step", 0))
        if not known:
            self._mlflow.log_params({key: str(value)[:_MAX_PARAMETER] for key, value in flattened(config)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends a step, unless an earlier start has."""
        if step > self._last or (step == self._last and "eval_loss" in values):
            self._mlflow.log_metrics({**values, "step": float(step)}, step=step)

    def log_medium(self, step: int, name: str, value: Medium) -> None:
        """Sends an image or a text. An earlier start's is replaced."""
        if isinstance(value, Image):
            self._mlflow.log_image(value.pixels, f"{name}/{step}.png")
        elif isinstance(value, str):
            self._mlflow.log_text(value, f"{name}/{step}.txt")

    def finish(self) -> None:
        """Ends the run there."""
        self._mlflow.end_run()


def _ids(folder: Path) -> dict[str, object]:
    """The run's id in each service; empty for a new run, or if the file is damaged."""
    with contextlib.suppress(OSError):
        return read_object((folder / "loggers.json").read_bytes()) or {}
    return {}


def _write_id(folder: Path, service: str, value: object) -> None:
    """Stores the run's id in a service. Raises OSError."""
    with _IDS_LOCK:
        write_whole(folder / "loggers.json", json.dumps({**_ids(folder), service: str(value)}) + "\n")
