"""The exports of a run while it trains.

A folder is made of a checkpoint that is finished, by a thread of the first process. So an export needs no devices and no other process, and
training waits for it only at the end. A step that is being exported is not removed. The folder gets its name when all of it is on disk:
wherever the run is killed, the next start writes those that are missing. It takes no folder for its own that is not: one of another run is
refused, one of a step that the run has gone back behind is removed, and a damaged one is written again (`stamp.py`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import jax

from ..checkpoint.bucket_steps import SavedStep
from ..checkpoint.restore import first_line
from ..checkpoint.signature import read_key
from ..checkpoint.steps import open_steps, remove
from ..config import Run
from ..files.disk import describe
from ..files.ends import EndError
from ..files.streams import say
from ..processes.processes import agree_on_input
from .form import run_form
from .model import SavedModel
from .stamp import is_whole, origin_of, run_of, write_stamp
from .write import write_export

_FILE_BYTES = 5 * 10**9
_STEP = re.compile(r"[1-9][0-9]{0,9}")


class ExportError(EndError):
    """The model of the last step could not be exported; the message says why."""


class _ClosedError(Exception):
    """The run ends before an export does."""


class Exports:
    """The exports of one start of a run. event: records one. num_steps: the last step, which is known once the data is open."""

    def __init__(self, run: Run, event: Callable[..., None]):
        self.num_steps, self._id = 0, ""
        self._run, self._config, self._event = run, run.config.checkpoint.export, event
        self._ended: SimpleQueue[tuple[str, float, dict[str, object]]] = SimpleQueue()
        self._steps = open_steps(run.config.run.checkpoints, read_key(run.config.checkpoint.key))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._futures: dict[int, Future[None]] = {}
        self._is_closed = threading.Event()

    @property
    def are_asked_for(self) -> bool:
        """Whether the run writes any."""
        return self._config is not None

    def is_due(self, step: int) -> bool:
        """Whether a step is exported."""
        if self._config is None:
            return False
        return step == self.num_steps or (self._config.every > 0 and step % self._config.every == 0)

    def begin(self, first: int, run: str) -> None:
        """Starts to export the steps that an earlier start has saved, and not exported.

        first: the step at which this start begins. run: the identity of the run. Raises InputError, on all processes, for folders of
        another run.
        """
        if self._config is None:
            return
        path, is_first, self._id, problems = Path(self._config.path), jax.process_index() == 0, run, list[str]()
        where = f"{self._run.where('checkpoint.export.path')}: checkpoint.export.path"
        try:
            found = [entry for entry in path.iterdir() if _STEP.fullmatch(entry.name)] if is_first and os.path.lexists(path) else []
            others = [entry for entry in found if first == 0 or run_of(entry) not in (None, run)]
            remedy = "Name another folder, or remove what is in it. It is another run's"
            problems += [f"{where}: has {other} already. {remedy}" for other in others[:1]]
            for entry in found if not others else ():
                is_in_the_way = int(entry.name) <= self.num_steps and self.is_due(int(entry.name))
                if int(entry.name) > first and (is_in_the_way or run_of(entry) == run):
                    say(f"{entry} is of a later step than {first}, from which the run goes on. {self._clear(entry)}")
        except OSError as error:
            problems.append(f"{where}: cannot be read or written: {describe(error, path)}")
        agree_on_input(problems)
        if not is_first:
            return
        for step in self._steps.listed():
            # Its files may have changed since.
            self._submit(step, lambda step=step: self._steps.open(step))

    def _clear(self, folder: Path) -> str:
        """Makes room for an export. What no stamp calls this run's gets another name. Returns a sentence about it. Raises OSError."""
        if (owner := run_of(folder)) == self._id:
            remove(folder)
            return "It is removed"
        if owner is not None:
            raise FileExistsError(errno.EEXIST, "has the export of another run", str(folder))
        names = (folder.with_name(f"{folder.name}.broken{n or ''}") for n in itertools.count())
        target = next(path for path in names if not os.path.lexists(path))
        folder.rename(target)
        return f"It is renamed to {target.name}"

    def saved(self, step: int) -> None:
        """Starts to export a step that was saved just now, if it is due. Called by the first process."""
        self._submit(step, lambda: self._steps.saved(step))

    def held(self) -> set[int]:
        """The steps whose checkpoints must stay."""
        return {step for step, future in list(self._futures.items()) if not future.done()}

    def poll(self) -> None:
        """Records the exports that have ended."""
        with contextlib.suppress(Empty):
            while True:
                name, ended, details = self._ended.get_nowait()
                # Without a duration: the run did not wait for it.
                self._event(name, ended, 0.0, **details)

    def finish(self) -> None:
        """Returns when all exports have ended. Raises ExportError if that of the last step has failed."""
        futures = list(self._futures.items())
        wait([future for _, future in futures])
        self.poll()
        for step, future in futures:
            error = future.exception()
            if error is not None and step == self.num_steps:
                again = f"The checkpoint is saved; the same command tries again, and so does jgt export {self._run.config.run.place} FOLDER"
                raise ExportError(f"the model of step {step} could not be exported: {first_line(error)}. {again}") from error

    def close(self) -> None:
        """Ends the exports that are under way, which the next start begins again."""
        self._is_closed.set()
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, step: int, read: Callable[[], SavedStep]) -> None:
        if not self.is_due(step) or step in self._futures:
            return
        # After `close`, the next start does it.
        with contextlib.suppress(RuntimeError):
            self._futures[step] = self._pool.submit(self._export, step, self._folder(step), read)

    def _folder(self, step: int) -> Path:
        assert self._config is not None
        return Path(self._config.path) / str(step)

    def _export(self, step: int, folder: Path, read: Callable[[], SavedStep]) -> None:
        assert self._config is not None
        begun = time.time()
        try:
            origin = origin_of(saved := read())
            if os.path.lexists(folder):
                if is_whole(folder, origin):
                    return
                say(f"{folder} is not the model of step {step} of this run, or is damaged. {self._clear(folder)}, and written again")
            model = SavedModel.of(saved, self._run.config.model, self._run.config.lora)
            form = run_form(self._run, self._run.config.run.path, model.shapes)
            sizes, stamp = {"max_file_bytes": _FILE_BYTES}, partial(write_stamp, origin=origin)
            write_export(form, model, folder, dtype=self._config.dtype, **sizes, check=self._check, last=stamp)
        except _ClosedError:
            pass
        except Exception as error:
            self._ended.put(("export_failed", time.time(), {"step": step, "why": first_line(error)}))
            say(f"the model of step {step} could not be exported: {first_line(error)}")
            raise
        else:
            self._ended.put(("export", time.time(), {"step": step, "path": str(folder), "took": round(time.time() - begun, 3)}))

    def _check(self) -> None:
        if self._is_closed.is_set():
            raise _ClosedError
