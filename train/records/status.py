"""The present of a process on disk: `status-P.json`, which is replaced once a second.

Its readers (`jgt top`, `jgt report`, the next start) tell by it what a process does that has not ended: how long it has been compiling, the
step that hangs, and where a killed process was. It has a thread of its own. A disk that does not answer delays this thread, and neither
the one that trains nor the watch, which has to end what hangs. A process that is suspended writes nothing, so an old file says that too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..report.status import status_file, take_requests
from .sink import Sink
from .timeline import Timeline

_SECONDS = 1.0
_LAST_SECONDS = 1.0
"""How long a process that ends waits for its last status."""


class Status:
    """Writes the status of a process until it is closed. process: its number, or `launcher`. now(): what else the status says.

    is_ours(): whether the run directory still belongs to this run; if not, nothing is written. asked(what) is called for what the run is
    asked for by a file; of all processes, one has it.
    """

    def __init__(
        self,
        folder: Path,
        process: int | str,
        timeline: Timeline,
        now: Callable[[], Mapping[str, Any]] = dict,
        is_ours: Callable[[], bool] = lambda: True,
        asked: Callable[[str], object] | None = None,
    ):
        self._path, self._timeline, self._now, self._is_ours = status_file(folder, process), timeline, now, is_ours
        self._fixed = {"process": process, "host": socket.gethostname(), "pid": os.getpid()}
        self._asked = asked
        self._sink = Sink(self._path.name, self._replace)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        # The system may allow no further thread; then the run has no status.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def close(self) -> None:
        """Writes the last status, with why the process ended, and returns; within a second, also if the disk does not answer."""
        self._timeline.figures.setdefault("end", "ended")
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.is_set()
            if self._is_ours():
                self.write()
            if self._asked is not None and not is_last:
                for what in take_requests(self._path.parent):
                    self._asked(what)
            if not is_last:
                self._is_closed.wait(_SECONDS)

    def write(self) -> None:
        """Writes the status as it is now, or says once that this fails."""
        now = dict[str, Any]()
        # A device that fails may not say how much memory it has.
        with contextlib.suppress(Exception):
            now.update(self._now())
        fixed = {**self._fixed, "time": round(time.time(), 3)}
        self._sink.put(json.dumps({**fixed, **self._timeline.figures, **now, "row": self._timeline.open_row()}, default=str))

    def _replace(self, text: str) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            # A stranger's directory may have a link of this name.
            new.unlink(missing_ok=True)
            with new.open("x") as file:
                file.write(text)
            new.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
