"""A start of a run in this process: objects that are opened one after another, one loop, and what is said and written at the end.

What wrong input can be found is found by `open_all`; `open_session` holds the directory and opens what is written; `Start` finds the
state to begin from, while XLA compiles the step; `Loop` trains.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax

from ..checkpoint.checkpoint import Checkpoints
from ..config import Run
from ..files.ends import Exit
from ..processes.processes import barrier, shared_store
from ..processes.watch import Watch
from ..records.progress import Progress
from ..records.step_range import StepRange
from ..setup import Setup
from ..setup.feed import DeviceBatch, Feed
from ..setup.xla import open_devices
from ..step.sync.phases import Exchanges
from ..verify.background import LayoutCheck
from .compiling import Compiling
from .directory.history import replace_config
from .directory.identity import Resume
from .end import conclude
from .hooks import Hooks
from .hooks.evaluator import Evaluator
from .loop import Loop
from .opened import Opened, open_all
from .pairs import with_scored_pairs
from .saves import Saves
from .session import Session, open_checkpoints, open_session
from .start import Position, Start


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
    watching = Watch(run.config.watchdog, run.config.run.path, shared_store(), stopped_code, owns_process=owns_process)
    with watching as watch, contextlib.ExitStack() as closing:
        # Waits until each process has told the others which devices it has.
        open_devices()
        watch.begin_unlimited("opening model and data")
        opened = open_all(run, resume)
        session = closing.enter_context(open_session(opened, watch, resume, profiled=profiled, begun=begun, entered=entered))
        with open_checkpoints(session, opened) as checkpoints:
            opened = with_scored_pairs(opened, session, has_begun=checkpoints.newest() > 0)
            layout = closing.enter_context(_compared_layout(session))
            feed = Feed(opened.data, opened.setup)
            for note in feed.notes:
                session.screen.say(note)
            compiling = Compiling(opened.setup, session)
            if not opened.has_ended(checkpoints.newest()):
                # XLA compiles the step while the state is found.
                compiling.begin()
            position = Start(opened.setup, opened.data.fingerprint, session.phase, session.screen.say).position(checkpoints, resume)
            opened = _at(opened, session, position)
            first = time.perf_counter()
            trains = opened.ended_at is None and position.step < opened.setup.run.steps
            inputs = _inputs(opened, session, feed, position, compiling) if trains else None
            loop = _loop(opened, session, checkpoints, feed, layout, position)
            if inputs is None:
                loop.train_nothing()
            else:
                loop.train(*inputs)
            conclude(loop, position.step, time.perf_counter() - first)
    is_done = loop.position.step >= loop.last_step
    if on_end is not None:
        on_end(loop.setup, loop.position, is_done)
    return session.exit_code(Exit.DONE if is_done else stopped_code)


@contextlib.contextmanager
def _compared_layout(session: Session) -> Iterator[LayoutCheck]:
    """The comparison of the run's layout with one device, which has begun if the layout needs one, and ends with the block."""
    records = session.records
    with contextlib.closing(LayoutCheck(session.run, records.event, records.alert, session.watch.request)) as layout:
        session.watch.begin_unlimited("comparing the layout with one device")
        layout.begin(session.screen.say)
        yield layout


def _at(opened: Opened, session: Session, position: Position) -> Opened:
    """Takes data, exports and records back to the position from which this start trains. The run then has its number of steps."""
    data, evaluations, config = opened.data, opened.evaluations, session.run.config
    data.restore(position.samples, position.data)
    setup = opened.setup.with_epochs(data.train_sequences, position.step, position.samples)
    if config.train.epochs is not None and data.train_sequences is not None:
        session.screen.say(f"{config.train.epochs:g} epochs of {data.train_sequences:,} samples are {setup.run.steps:,} steps")
    session.exports.num_steps = setup.run.steps
    session.exports.begin(position.step, position.kept.id)
    session.profiler.check(position.step, setup.run.steps)
    # Steps after the checkpoint are trained again, and would be logged twice.
    session.records.forget_after(position.step)
    ended_at = None
    if evaluations is not None and evaluations.begin(position.step, position.kept.evaluations) and position.step < setup.run.steps:
        ended_at = session.exports.num_steps = position.step
    return replace(opened, setup=setup, ended_at=ended_at)


def _inputs(
    opened: Opened, session: Session, feed: Feed, position: Position, compiling: Compiling
) -> tuple[jax.stages.Compiled, Exchanges | None, Iterator[DeviceBatch]]:
    """The compiled step, the compiled exchanges, and the training batches from the position on. Stores this start's config as the run's."""
    change = replace_config(opened.setup.run, opened.data.fingerprint, position.step) if session.lock is not None else None
    if change is not None:
        session.records.event("config", time.time(), 0.0, **change.to_json())
        session.screen.say(change.text)
    compiling.begin()
    if not feed.data.is_stream:
        batches = feed.train(position.samples)
    else:
        # A stream is brought to its place, which may take any time.
        with session.phase("open", what="stream"):
            session.watch.begin_unlimited("reading the stream up to its place")
            batches = feed.train(position.samples)
            barrier("stream")
    # Compiled before the loop, so that the first step's time limit and the first lap do not include it.
    with session.phase("compile"):
        compiled = compiling.result(), opened.setup.compile_exchanges()
        barrier("compiled step")
    return *compiled, batches


def _loop(opened: Opened, session: Session, checkpoints: Checkpoints, feed: Feed, layout: LayoutCheck, position: Position) -> Loop:
    """The loop, which begins now: its times are those of steps, and saves are due by them."""
    setup, data, evaluations = opened.setup, opened.data, opened.evaluations
    hooks = Hooks(opened.hooks, setup, session.watch, session.records) if opened.hooks else None
    return Loop(
        setup=setup,
        session=session,
        feed=feed,
        layout=layout,
        evaluator=Evaluator(setup, feed, session.screen, session.records, session.phase, opened.tasks, evaluations, hooks),
        progress=Progress(setup, session.screen, session.records, position.step, data.train_sequences),
        saves=Saves(setup, data, checkpoints, session.watch, session.records, session.phase, position.step, evaluations, opened.reference),
        position=position,
        ended_at=opened.ended_at,
    )
