"""One start of a run in this process: what watches it, what it holds, and what it writes.

Any process may fail at any line, and all others then wait in their next collective. So whatever only one process can see (a directory in
use, an export of another run) is exchanged by `agree_on_input` before training, and the watch, which ends a process whose peers are gone,
is entered before a session and left after it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jgt.document import InputError

from ..checkpoint.checkpoint import Checkpoints
from ..config import Run, without_effect
from ..data.batches import Data
from ..data.mapped import DataChangedError
from ..export.exports import Exports
from ..files.disk import DiskError, describe
from ..files.ends import Exit, InUseError
from ..files.lease import Lease
from ..files.mirror import Mirror
from ..files.streams import say
from ..journal.sink import describe_lost
from ..journal.status import Status
from ..journal.timeline import OTHER
from ..processes.processes import agree_on_input, clock_ahead, number_of_processes, this_process
from ..processes.watch import Watch
from ..records.console import Screen
from ..records.nvml import Gpus
from ..records.profiler import Profiler
from ..records.progress import memory_of_devices
from ..records.records import Records, open_loggers
from ..records.step_range import StepRange
from ..records.summary import describe_data, describe_size, describe_start, describe_sync
from ..setup import Setup
from .directory.folder import Lock, copied, hold_bucket, lock_folder, metrics_port, move_earlier_run
from .directory.history import begin_folder
from .directory.identity import Resume, fingerprints
from .faults import Faults
from .hooks import Alerts
from .opened import Opened

_COPY_SECONDS = 2.0
"""How long a process that the watch ends may copy its records to a bucket."""
_LAST_SAVE_SECONDS = 10
"""How long a failing process waits for a save that needs the other processes, which may be gone."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The watch, the locks and the records of a start, beside its program and its data.

    lock: on the run directory or its bucket; None in other processes than the first. mirror: copies the records to a bucket.
    """

    run: Run
    watch: Watch
    records: Records
    screen: Screen
    lock: Lock | Lease | None
    mirror: Mirror | None
    exports: Exports
    faults: Faults
    profiler: Profiler

    @contextlib.contextmanager
    def phase(self, name: str, **details: object) -> Iterator[None]:
        """Inside, the watch and the records know what the run does instead of steps."""
        with self.watch.phase(name), self.records.phase(name, **details):
            yield

    def is_held(self) -> bool:
        """Whether the run directory still belongs to this run, as far as this process knows."""
        return self.lock is None or self.lock.is_held()

    def check_lock(self) -> None:
        """Raises InUseError if the run directory may belong to another run by now."""
        if self.lock is not None:
            self.lock.check()

    def saved(self, step: int) -> None:
        """Called by a thread of the first process when a checkpoint is finished."""
        self.records.wrote(step)
        self.exports.saved(step)
        if self.mirror is not None:
            self.mirror.wake()

    def lost(self) -> dict[str, int]:
        """The number of lost records of each sink that lost any."""
        sink = self.screen.sink
        return {**({"stdout": sink.lost} if sink.lost else {}), **self.records.lost}

    def exit_code(self, code: int) -> int:
        """The exit code of a run that would end with `code`. Says which records were lost."""
        if not (lost := self.lost()):
            return code
        say(describe_lost(lost))
        # A code that was asked for has its own reader.
        return Exit.LOST if code == Exit.DONE else code


@contextlib.contextmanager
def open_session(
    opened: Opened, watch: Watch, resume: Resume, *, profiled: StepRange | None, begun: float | None, entered: float
) -> Iterator[Session]:
    """Holds the run directory, and opens everything that a start writes into it. begun, entered: as in `_record_start`."""
    run, process, lock, problems = opened.setup.run, this_process(), None, list[str]()
    screen = Screen(enabled=process == 0)
    with contextlib.ExitStack() as closing:
        # Only the first process has a lock: it alone names and removes files that belong to all.
        with InputError.collect(problems):
            lock = None if process else _claim_folder(run, opened.data, resume, screen, closing)
        with InputError.collect(problems):
            closing.enter_context(metrics_port(run, process))
        # The others write into the directory only now, after an earlier run was moved out of it.
        agree_on_input(problems)
        mirror = closing.enter_context(copied(run.config.run, process, lock if isinstance(lock, Lease) else None))
        records = _open_records(run, watch, lock, mirror, closing, entered)
        _record_start(records, begun or entered, entered)
        _introduce(opened.setup, opened.data, screen)
        faults = Faults(
            run.config.debug.faults,
            run.config.run.path,
            process,
            lambda fault: records.event("fault", time.time(), 0.0, step=fault.at_step, kind=fault.kind),
        )
        yield Session(
            run=run,
            watch=watch,
            records=records,
            screen=screen,
            lock=lock,
            mirror=mirror,
            exports=closing.enter_context(contextlib.closing(Exports(run, records.event))),
            faults=faults,
            profiler=closing.enter_context(contextlib.closing(Profiler(profiled, run.config.run.path, process, screen))),
        )


@contextlib.contextmanager
def open_checkpoints(session: Session, opened: Opened) -> Iterator[Checkpoints]:
    """The checkpoints of the run. Afterwards no save is under way. If the block fails, a line on stderr says what is saved."""
    run, evaluations = session.run, opened.evaluations
    checkpoints = Checkpoints(
        run.config.run.checkpoints,
        run.config.checkpoint,
        mesh=opened.setup.mesh.shape,
        fingerprints=fingerprints(run, opened.data.fingerprint),
        free=session.faults.free,
        is_ours=session.is_held,
        saved=session.saved,
        held=lambda: session.exports.held() | (set() if evaluations is None else evaluations.held()),
    )
    try:
        yield checkpoints
    except KeyboardInterrupt:
        # The next run of this process may have the same directory.
        checkpoints.close(seconds=_LAST_SAVE_SECONDS)
        raise
    except BaseException as error:
        # A save under way is worth waiting for. With several processes not for ever, because it needs all of them.
        checkpoints.close(seconds=None if number_of_processes() == 1 else _LAST_SAVE_SECONDS)
        # The directory may belong to another run by now.
        if not isinstance(error, InUseError):
            session.records.stop(why=f"failed: {type(error).__name__}")
        _explain(error, checkpoints)
        raise
    checkpoints.close()


def _explain(error: BaseException, checkpoints: Checkpoints) -> None:
    """Says what of a run that failed is saved. Raises DataChangedError in place of one that does not say it."""
    if isinstance(error, DataChangedError):
        unsaved = "Steps after the newest checkpoint may have read wrong tokens, and are not saved. Put the file back"
        raise DataChangedError(f"{error}. {unsaved}; {checkpoints.describe()}") from None
    # Where the disk cannot be read, there is nothing to describe.
    if not isinstance(error, InUseError | DiskError):
        # Wrong input would stop the next start too.
        say(f"the run failed; {checkpoints.describe(resumes=not isinstance(error, InputError))}")


def _claim_folder(run: Run, data: Data, resume: Resume, screen: Screen, closing: contextlib.ExitStack) -> Lock | Lease:
    """Locks the run directory until `closing` closes, and writes the files that describe the run into it."""
    folder = run.config.run.path
    lock = closing.enter_context(lock_folder(folder))
    if run.config.run.url is not None:
        try:
            lock = closing.enter_context(hold_bucket(run.config.run))
        except OSError as error:
            raise DiskError(f"{describe(error, run.config.run.url)}. No checkpoint was changed") from error
    elif resume.never and (moved := move_earlier_run(folder)):
        screen.say(f"The earlier run was moved to {moved}")
    begin_folder(run, data.fingerprint)
    return lock


def _open_records(
    run: Run, watch: Watch, lock: Lock | Lease | None, mirror: Mirror | None, closing: contextlib.ExitStack, entered: float
) -> Records:
    """The records of this process, and its status, until `closing` closes. entered: when it entered `train`, in seconds since 1970."""
    folder, process = run.config.run.path, this_process()
    loggers = [] if process else open_loggers(run.config.log, folder, run.config.run.name, run.resolved)
    alerts = None if process or run.config.alerts is None else Alerts(run.config.alerts, folder)
    records = Records(folder, process=process, loggers=[*loggers, *([] if alerts is None else [alerts])], begun=entered)
    closing.callback(records.close)
    if alerts is not None:
        alerts.begin(records.event)
    gpus = Gpus(jax.local_device_count() if jax.default_backend() == "gpu" else 0)

    def now() -> dict[str, object]:
        return {**watch.now(), "memory": memory_of_devices(), **gpus.figures()}

    # Another run cannot have this folder while its lock is held, whoever has the lease of its bucket.
    may_write = lock.is_held if isinstance(lock, Lock) else lambda: True
    status = Status(folder, process, records.timeline, now, may_write, None if process else watch.request)
    closing.callback(status.close)
    watch.on_end = lambda why: _last_words(why, records, status, mirror)
    records.timeline.figures["clock"] = clock_ahead()
    return records


def _last_words(why: str, records: Records, status: Status, mirror: Mirror | None) -> None:
    """Writes what is known of a process that the watch ends."""
    records.stop(why=why)
    status.close()
    if mirror is not None:
        mirror.flush(_COPY_SECONDS)


def _introduce(setup: Setup, data: Data, screen: Screen) -> None:
    screen.say(describe_start(setup.run.config.run.path))
    screen.setup(setup)
    for line in (describe_data(data.fingerprint), describe_size(setup), *describe_sync(setup)):
        screen.say(line)
    for line in without_effect(setup.run, has_held_out=bool(data.eval_parts)):
        screen.say(line)


def _record_start(records: Records, begun: float, entered: float) -> None:
    """Records which process has started, when it began, and when it entered `train`, both in seconds since 1970."""
    processes = {"processes": number_of_processes(), "process": this_process(), "devices": jax.device_count()}
    who = {**processes, "host": socket.gethostname(), "pid": os.getpid()}
    clock = round(records.timeline.figures["clock"], 4)
    records.event("start", begun, entered - begun, **who, jax=jax.__version__, clock=clock)
    records.timeline.begin(OTHER)
