"""A start of a run in this process: open the directory, train, and leave everything as the next start needs it.

Any process may fail at any line, and all others then wait in their next collective. So whatever only one process can see (wrong input, a
directory in use) is found before training and exchanged by `agree_on_input` or a barrier, and the watch, which ends a process whose peers
are gone, is entered first and left last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jgt.document import InputError

from ..checkpoint.checkpoint import Checkpoints
from ..config import Run, without_effect
from ..data.batches import Data
from ..data.mapped import DataChangedError
from ..evaluate.reference import SCORES, checksum, reference_of, with_reference
from ..export.exports import Exports
from ..files.disk import DiskError, describe
from ..files.ends import Exit, InUseError
from ..files.lease import Lease
from ..files.mirror import Mirror
from ..files.streams import say
from ..journal.sink import describe_lost
from ..journal.status import Status
from ..journal.timeline import OTHER
from ..processes.processes import agree_on_input, clock_ahead, number_of_processes, shared_store, this_process
from ..processes.watch import Watch
from ..records.console import Screen
from ..records.nvml import Gpus
from ..records.profiler import Profiler
from ..records.progress import memory_of_devices
from ..records.records import Records, open_loggers
from ..records.step_range import StepRange
from ..records.summary import describe_data, describe_size, describe_start, describe_sync
from ..settings.sections import DPO
from ..setup import Setup
from ..setup.xla import open_devices
from ..step.state import State
from ..verify.background import LayoutCheck
from .faults import Faults
from .folder import Lock, copied, hold_bucket, lock_folder, move_earlier_run
from .history import begin_folder
from .hooks import Alerts, Hooks
from .identity import Resume, fingerprints
from .loop import Loop, lost_records
from .opened import evaluations_of, hooks_of, open_run, open_tasks
from .replay import digest_of_arrays
from .start import Position, Start

_COPY_SECONDS = 2.0
"""How long a process that the watch ends may copy its records to a bucket."""
_LAST_SAVE_SECONDS = 10
"""How long a failing process waits for a save that needs the other processes, which may be gone."""


def train(
    run: Run,
    resume: Resume | None = None,
    *,
    profiled: StepRange | None = None,
    begun: float | None = None,
    stopped_code: int = Exit.DONE,
    on_end: Callable[[Setup, Position, bool], None] | None = None,
    owns_process: bool = True,
) -> int:
    """Trains until the last step, from the newest checkpoint if there is one, or until a signal asks the run to stop.

    profiled: the steps to profile. begun: when this process started, in seconds since 1970. stopped_code: the exit code if a signal comes
    first. on_end: gets the program, the last position, and whether the run is done. owns_process: whether a second Ctrl-C ends the process,
    instead of raising KeyboardInterrupt. Returns the exit code. Raises InputError for wrong input, and SkippedError, SaveError or
    DataChangedError if the run cannot continue.
    """
    resume, entered = resume or Resume(), time.time()
    folder, process = run.config.run.path, this_process()
    screen, done = Screen(enabled=process == 0), False
    with (
        Watch(run.config.watchdog, folder, shared_store(), stopped_code, owns_process=owns_process) as watch,
        contextlib.ExitStack() as closing,
    ):
        # Waits until each process has told the others which devices it has.
        open_devices()
        watch.begin_unlimited("opening model and data")
        setup, data = open_run(run, resume)
        tasks, evaluations, hooks = open_tasks(setup), evaluations_of(setup, data.eval_parts), hooks_of(run)
        # Only the first process has a lock: it alone names and removes files that belong to all.
        lock, problems = None, list[str]()
        with InputError.collect(problems):
            lock = None if process else _claim_folder(run, data, resume, screen, closing)
        # The others write into the directory only now, after an earlier run was moved out of it.
        agree_on_input(problems)
        mirror = closing.enter_context(copied(run.config.run, process, lock if isinstance(lock, Lease) else None))
        records = _open_records(run, watch, lock, mirror, closing, entered)
        _record_start(records, begun or entered, entered)
        _introduce(setup, data, screen)
        faults = Faults(
            run.config.debug.faults,
            folder,
            process,
            lambda fault: records.event("fault", time.time(), 0.0, step=fault.at_step, kind=fault.kind),
        )
        exports = closing.enter_context(contextlib.closing(Exports(run, records.event)))

        def held() -> set[int]:
            return exports.held() | (set() if evaluations is None else evaluations.held())

        def saved(step: int) -> None:
            records.wrote(step)
            exports.saved(step)
            if mirror is not None:
                mirror.wake()

        checkpoints = Checkpoints(
            run.config.run.checkpoints,
            run.config.checkpoint,
            mesh=setup.mesh.shape,
            fingerprints=fingerprints(run, data.fingerprint),
            free=faults.free,
            is_ours=_is_held(lock),
            saved=saved,
            held=held,
        )
        profiler = closing.enter_context(contextlib.closing(Profiler(profiled, folder, process, screen)))
        with _closed_afterwards(checkpoints, records):
            data, reference = _with_reference(setup, data, watch, records, screen, has_begun=checkpoints.newest() > 0)
            called = Hooks(hooks, setup, watch, records) if hooks else None
            layout = closing.enter_context(contextlib.closing(LayoutCheck(run, records.event, records.alert, watch.request)))
            watch.begin_unlimited("comparing the layout with one device")
            layout.begin(screen.say)
            parts = (checkpoints, exports, watch, faults, profiler, lock, tasks, evaluations, called, layout, reference)
            loop = Loop(setup, data, screen, records, *parts)
            position = loop.run(resume)
            done = position.step >= loop.last_step
    if on_end is not None:
        on_end(setup, position, done)
    return _exit_code(Exit.DONE if done else stopped_code, lost_records(screen, records))


def _with_reference(
    setup: Setup, data: Data, watch: Watch, records: Records, screen: Screen, *, has_begun: bool
) -> tuple[Data, Mapping[str, Any] | None]:
    """The data, in which pairs of answers have their log-probabilities under the model before the first step; and `Kept.reference`.

    Raises InputError if they have to be computed again, and the run would begin with another model now.
    """
    if setup.run.config.train.loss != DPO or not data.pairs:
        return data, None
    # Silent: what the run begins with is said when it begins.
    start = Start(setup, data.fingerprint, lambda name, **details: contextlib.nullcontext(), lambda line: None)
    known, file = dict(reference_of(setup.run) if has_begun else {}), setup.run.config.run.path / SCORES

    def first() -> State:
        position = start.fresh()
        state, was = position.state, {**known}
        model = setup.model_params(setup.eval_params(state)), setup.eval_variables(state)
        known.update(origin=position.origin, model=int(digest_of_arrays(model)))
        if was.get("model", known["model"]) != known["model"]:
            why = f"is lost or damaged, and {position.origin} has other parameters than {was.get('origin')} had when it was computed"
            raise InputError([f"{file}: {why}. Put the file or those parameters back, or begin another run (run.name=...)"])
        return state

    with watch.phase("eval"), records.phase("eval", step=0, what="reference"):
        watch.begin_unlimited("scoring pairs of answers with the model before the first step")
        data = with_reference(setup, data, first, screen.say, has_begun=has_begun)
    return data, {**known, "sha256": checksum(file)}


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

    def now() -> dict[str, Any]:
        return {**watch.now(), "memory": memory_of_devices(), **gpus.figures()}

    # Another run cannot have this folder while its lock is held, whoever has the lease of its bucket.
    may_write = _is_held(lock if isinstance(lock, Lock) else None)
    status = Status(folder, process, records.timeline, now, may_write, None if process else watch.request)
    closing.callback(status.close)
    watch.on_end = lambda why: _last_words(why, records, status, mirror)
    records.timeline.figures["clock"] = clock_ahead()
    return records


def _is_held(lock: Lock | Lease | None) -> Callable[[], bool]:
    return (lambda: True) if lock is None else lock.is_held


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


@contextlib.contextmanager
def _closed_afterwards(checkpoints: Checkpoints, records: Records) -> Iterator[None]:
    """Afterwards, no save is under way. If the block fails, the reason is recorded, and a line on stderr says what is saved."""
    try:
        yield
    except KeyboardInterrupt:
        # The next run of this process may have the same directory.
        checkpoints.close(seconds=_LAST_SAVE_SECONDS)
        raise
    except BaseException as error:
        # A save under way is worth waiting for. With several processes not for ever, because it needs all of them.
        checkpoints.close(seconds=None if number_of_processes() == 1 else _LAST_SAVE_SECONDS)
        # The directory may belong to another run by now.
        if not isinstance(error, InUseError):
            records.stop(why=f"failed: {type(error).__name__}")
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


def _exit_code(code: int, lost: Mapping[str, int]) -> int:
    """The exit code of a run that would end with `code`. Says which records were lost."""
    if not lost:
        return code
    say(describe_lost(lost))
    # A code that was asked for has its own reader.
    return Exit.LOST if code == Exit.DONE else code
