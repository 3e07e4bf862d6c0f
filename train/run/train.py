"""A start of a run in this process: open the directory, train, and leave everything as the next start needs it.

Any process may fail at any line, and all others then wait in their next collective. So whatever only one process can see (wrong input, a
directory in use) is found before training and exchanged by `agree_on_input` or a barrier, and the watch, which ends a process whose peers
are gone, is entered first and left last.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jgt import amount, path_text
from jgt.document import InputError

from ..checkpoint.checkpoint import Checkpoints
from ..checkpoint.disk import DiskError, describe
from ..command_line import Exit, InUseError, say
from ..config import Run
from ..data.batches import Data
from ..data.config import OwnData
from ..data.mapped import DataChangedError
from ..data.opening import open_data, open_own_data
from ..data.own import open_own
from ..evaluate.reference import with_reference
from ..export.exports import Exports
from ..export.form import run_form
from ..hooks import Alerts, Evaluations, Hook, Hooks, open_evaluations, open_hooks
from ..processes.processes import agree_on_input, barrier, clock_ahead, number_of_processes, shared_store, this_process
from ..processes.watch import Watch
from ..records.console import Screen
from ..records.nvml import Gpus
from ..records.profiler import Profiler
from ..records.progress import memory_of_devices
from ..records.records import Records, open_loggers
from ..records.sink import describe_lost
from ..records.status import Status
from ..records.step_range import StepRange
from ..records.summary import describe_data, describe_size, describe_start, describe_sync
from ..records.timeline import OTHER
from ..setup import Setup, prepare
from ..setup.fit import compiled_to_fit, with_remat
from ..setup.published import base_shapes
from ..store.lease import Lease
from ..store.mirror import Mirror
from .faults import Faults
from .folder import Lock, copied, hold_bucket, lock_folder, move_earlier_run
from .history import begin_folder
from .identity import Resume, check_data, fingerprints
from .loop import Loop, TaskMetrics, lost_records
from .start import Position, Start
from .xla import open_devices

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
        tasks, evaluations, hooks = _tasks(setup), _evaluations(setup, data), _hooks(run)
        # Only the first process has a lock: it alone names and removes files that belong to all. An error here leaves the other processes
        # in the barrier below. This one's watch reports it, and theirs end them.
        lock = None if process else _claim_folder(run, data, resume, screen, closing)
        # The others write into the directory only now, after an earlier run was moved out of it.
        barrier("run directory")
        mirror = closing.enter_context(copied(run.config.run, process, lock if isinstance(lock, Lease) else None))
        loggers = [] if process else open_loggers(run.config.log, folder, run.config.run.name, run.resolved)
        alerts = None if process or run.config.alerts is None else Alerts(run.config.alerts, folder)
        loggers += [] if alerts is None else [alerts]
        records = Records(folder, process=process, loggers=loggers, begun=entered)
        closing.callback(records.close)
        if alerts is not None:
            alerts.begin(records.event)
        is_ours = (lambda: True) if lock is None else lock.is_held
        asked = None if process else watch.request
        # Another run cannot have this folder while its lock is held, whoever has the lease of its bucket.
        may_write = is_ours if isinstance(lock, Lock) else lambda: True
        gpus = Gpus(jax.local_device_count() if jax.default_backend() == "gpu" else 0)

        def now() -> dict[str, Any]:
            return {**watch.now(), "memory": memory_of_devices(), **gpus.figures()}

        status = Status(folder, process, records.timeline, now, may_write, asked)
        closing.callback(status.close)
        watch.on_end = lambda why: _last_words(why, records, status, mirror)
        records.timeline.figures["clock"] = clock_ahead()
        _record_start(records, begun or entered, entered)
        _introduce(setup, data, screen)
        faults = Faults(
            run.config.debug.faults,
            folder,
            process,
            lambda fault: records.event("fault", time.time(), 0.0, step=fault.at_step, kind=fault.kind),
        )
        of_run = {"mesh": setup.mesh.shape, "fingerprints": fingerprints(run, data.fingerprint)}
        exports = closing.enter_context(contextlib.closing(Exports(run, records.event)))

        def held() -> set[int]:
            return exports.held() | (set() if evaluations is None else evaluations.held())

        def saved(step: int) -> None:
            records.wrote(step)
            exports.saved(step)
            if mirror is not None:
                mirror.wake()

        checkpoints = Checkpoints(
            run.config.run.checkpoints, run.config.checkpoint, **of_run, free=faults.free, is_ours=is_ours, saved=saved, held=held
        )
        profiler = closing.enter_context(contextlib.closing(Profiler(profiled, folder, process, screen)))
        with _closed_afterwards(checkpoints, records):
            data = _with_reference(setup, data, watch, records, screen, has_begun=checkpoints.newest() > 0)
            called = Hooks(hooks, setup, watch, records) if hooks else None
            loop = Loop(setup, data, screen, records, checkpoints, exports, watch, faults, profiler, lock, tasks, evaluations, called)
            position = loop.run(resume)
            done = position.step >= loop.last_step
    if on_end is not None:
        on_end(setup, position, done)
    return _exit_code(Exit.DONE if done else stopped_code, lost_records(screen, records))


def _tasks(setup: Setup) -> TaskMetrics | None:
    """The tasks of `eval:`. Raises InputError, on all processes."""
    run, tasks, problems = setup.run, None, list[str]()
    if not run.config.eval.tasks:
        return None
    # The harness takes seconds to import, and is optional.
    harness = importlib.import_module("..evaluate.harness", __package__)
    with InputError.collect(problems):
        tasks = harness.TasksOfRun(setup, run.config.data.tokenizer_name).metrics
    agree_on_input(problems, None)
    return tasks


def _evaluations(setup: Setup, data: Data) -> Evaluations | None:
    """The evaluations by which `checkpoint.best` and `train.stop_early` decide. Raises InputError, on all processes."""
    run, evaluations, problems = setup.run, None, list[str]()
    parts = ("", *(f"/{part}" for part in data.eval_parts if len(data.eval_parts) > 1)) if data.eval_parts else ()
    with InputError.collect(problems):
        evaluations = open_evaluations(run, lambda: [f"eval_{name}{part}" for name in setup.eval_metrics for part in parts])
    agree_on_input(problems, None)
    return evaluations


def _hooks(run: Run) -> list[Hook]:
    """The hooks of `hooks:`. Raises InputError, on all processes."""
    hooks, problems = list[Hook](), list[str]()
    with InputError.collect(problems):
        hooks += open_hooks(run)
    agree_on_input(problems, None)
    return hooks


def _with_reference(setup: Setup, data: Data, watch: Watch, records: Records, screen: Screen, *, has_begun: bool) -> Data:
    """The data, in which pairs of answers have their log-probabilities under the model before the first step."""
    if not data.pairs:
        return data
    # Silent: what the run begins with is said when it begins.
    start = Start(setup, data.fingerprint, lambda name, **details: contextlib.nullcontext(), lambda line: None)
    with watch.phase("eval"), records.phase("eval", step=0, what="reference"):
        watch.begin_unlimited("scoring pairs of answers with the model before the first step")
        return with_reference(setup, data, lambda: start.fresh().state, screen.say, has_begun=has_begun)


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


def opened_data(run: Run) -> Data:
    """The data of a run. Raises InputError."""
    data, folder, seed = run.config.data, run.config.run.path, run.config.run.seed
    sizes = {"seq": run.config.model.seq, "vocab": run.config.model.vocab}
    if isinstance(data, OwnData):
        return open_own_data(open_own(data, run.code, run.where, **sizes), data, seed=seed, processes=number_of_processes())
    return open_data(data, **sizes, seed=seed, cache_dir=folder / "data", where=run.where)


def open_run(run: Run, resume: Resume | None = None) -> tuple[Setup, Data]:
    """The program and the data of a run. Raises InputError, on all processes, with everything that is wrong with either."""
    config = run.config
    problems: list[str] = []
    setup = data = None
    if isinstance(config.data, OwnData):
        # First, because its samples say which arrays the program gets.
        with InputError.collect(problems):
            data = opened_data(run)
    # The data is opened even if the program is wrong, so that all problems are reported at once.
    if data is not None or not problems:
        with InputError.collect(problems):
            setup = prepare(run, element=None if data is None else data.element)
    if setup is not None and config.checkpoint.export is not None:
        # Now, and not after days of training.
        with InputError.collect(problems):
            shapes = jax.tree.leaves_with_path(base_shapes(setup))
            run_form(run, config.run.path, {path_text(path): tuple(x.shape) for path, x in shapes})
    if not isinstance(config.data, OwnData):
        with InputError.collect(problems):
            data = opened_data(run)
    # One process suffices for this check: if it fails, the others stop in agree_on_input too.
    if data is not None and jax.process_index() == 0:
        with InputError.collect(problems):
            check_data(run, data.fingerprint, resume or Resume())
    agree_on_input(problems, (run.resolved(), None if data is None else data.fingerprint))
    assert setup is not None and data is not None
    element = setup.program.element
    setup = with_remat(setup, lambda remat: prepare(run, element=element, remat=remat), compiled_to_fit)
    return setup.with_epochs(data.train_sequences), data


def dry_run(run: Run) -> None:
    """Opens model and data on the devices, compiles the step, and prints its bytes per device."""
    # All processes open the run and compile, since compiling may need all of them; the first one prints.
    screen = Screen(enabled=jax.process_index() == 0)
    setup, data = open_run(run)
    screen.setup(setup)
    screen.say(describe_data(data.fingerprint))
    started = time.perf_counter()
    memory = setup.compile_train_step().memory_analysis()
    screen.say(f"Compiled the step in {time.perf_counter() - started:.1f} s")
    shapes, places = setup.shapes, setup.shardings
    rows = [
        ["parameters", amount(_bytes_per_device((shapes.params, shapes.frozen), (places.params, places.frozen)), "B")],
        ["optimizer state", amount(_bytes_per_device(shapes.opt_state, places.opt_state), "B")],
        *([["variables", amount(_bytes_per_device(shapes.variables, places.variables), "B")]] if shapes.variables else []),
        ["batch", amount(_bytes_per_device(setup.batch_shapes, setup.batch_shardings), "B")],
        # XLA's own figure: what it allocates beyond arguments and results.
        ["temporary (activations, gradients)", amount(memory.temp_size_in_bytes, "B")],
        ["arguments", amount(memory.argument_size_in_bytes, "B")],
        ["outputs (donated)", f"{amount(memory.output_size_in_bytes, 'B')} ({amount(memory.alias_size_in_bytes, 'B')})"],
    ]
    screen.table("Bytes per device", ["what", "bytes"], rows, numbers=1)


def _bytes_per_device(shapes: Any, shardings: Any) -> int:
    """The bytes of one device's shards of a tree of arrays. The trees of shapes and of shardings have the same structure."""
    shards = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(shards))
