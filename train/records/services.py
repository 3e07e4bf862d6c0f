"""Tracking services as loggers: Weights & Biases and MLflow.

A service is somewhere else: its client may wait for a network, ask for a key, or raise anything. So all calls happen in a thread of the
service's own, and training only puts rows into a queue of limited length. A call that fails costs its rows, and the next row is a new
attempt. At the end of the run the thread gets some time to send what is left.

A run is one run of the service, over all its starts: its id there is stored in the run directory. Steps that the service has already are
not sent again when a restart trains them again. The clients take their addresses and keys from the environment (`WANDB_...`,
`MLFLOW_...`), and never from a config, which may be shared.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..report.rows import flattened
from ..sink import Sink, say

IDS = "loggers.json"
"""The file with the run's id in each service."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for rows that are not sent yet."""
_PROJECT = "jgt"
_WAITING_ROWS = 10_000
_MAX_PARAMETER = 500
_MAX_BYTES = 1_000_000
_WRITING = threading.Lock()


class Client(Protocol):
    """A connection to a service. Its methods may take long and may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the metrics of a step."""
        ...

    def finish(self) -> None:
        """Waits until everything is sent, and closes the connection."""
        ...


class Service:
    """A logger that sends rows in a thread of its own. connect: opens the connection; it is called again after it has failed."""

    def __init__(self, name: str, connect: Callable[[], Client]):
        self._connect, self._client = connect, None
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_WAITING_ROWS)
        self.sink = Sink(name, self)
        # A daemon: a service that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the metrics of a step to what is to be sent."""
        row = {name: float(value) for name, value in values.items() if isinstance(value, int | float) and name != "time"}
        self.sink.attempt(lambda: self._put((step, row)))

    def write(self, record: bytes) -> None:
        """Not used: rows are not bytes here."""

    def forget_after(self, step: int) -> None:
        """The service keeps the steps that it has."""

    def close(self) -> None:
        """Waits a while until everything is sent. Rows that are not are lost."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            say(f"{self.sink.name} does not answer; the run ends without it")
            self.sink.lost += self._rows.qsize()

    def _put(self, row: tuple[int, dict[str, float]]) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            raise OSError(f"it has not taken the last {_WAITING_ROWS:,} rows") from None

    def _run(self) -> None:
        for step, values in iter(self._rows.get, None):
            self.sink.attempt(lambda step=step, values=values: self._send(step, values))
        if self._client is not None:
            self.sink.attempt(self._finish)

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        with _as_os_error():
            if self._client is None:
                self._client = self._connect()
            self._client.log(step, values)

    def _finish(self) -> None:
        with _as_os_error():
            assert self._client is not None
            self._client.finish()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Clients raise classes of their own, and a sink knows OSError."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error


class WandbClient:
    """A run of Weights & Biases, https://docs.wandb.ai/ref/python. WANDB_PROJECT, WANDB_MODE and the like are its own variables."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]):
        # Imported here, because it takes seconds, and only runs that log to it pay for it.
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=name,
            id=read_id(folder, "wandb"),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            # It would print among the step lines, and record the screen.
            settings={"silent": True, "console": "off"},
        )
        write_id(folder, "wandb", str(self._run.id))
        self._last = int(self._run.summary.get("_step", 0) or 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends a step. wandb itself puts metrics of one step together."""
        if step >= self._last:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


class MlflowClient:
    """A run of MLflow, https://mlflow.org/docs/latest/python_api. MLFLOW_TRACKING_URI and the like are its own variables."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]):
        self._mlflow: Any = importlib.import_module("mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & set(os.environ):
            self._mlflow.set_experiment(_PROJECT)
        known = read_id(folder, "mlflow")
        run = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=name)
        write_id(folder, "mlflow", str(run.info.run_id))
        # The row of a step has the step as a metric, too.
        self._last = int(run.data.metrics.get("step", 0))
        if not known:
            self._mlflow.log_params({key: str(value)[:_MAX_PARAMETER] for key, value in flattened(config)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends a step, unless an earlier start has."""
        if step > self._last or (step == self._last and "eval_loss" in values):
            self._mlflow.log_metrics({**values, "step": float(step)}, step=step)

    def finish(self) -> None:
        """Ends the run there."""
        self._mlflow.end_run()


def read_id(folder: Path, service: str) -> str | None:
    """The run's id in a service; None for a new run."""
    found = _ids(folder).get(service)
    return found if isinstance(found, str) else None


def write_id(folder: Path, service: str, value: str) -> None:
    """Stores the run's id in a service. Raises OSError."""
    # Each service has a thread.
    with _WRITING:
        new = folder / f"{IDS}.new"
        new.write_text(json.dumps({**_ids(folder), service: value}) + "\n")
        new.replace(folder / IDS)


def _ids(folder: Path) -> dict[str, Any]:
    try:
        with (folder / IDS).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
