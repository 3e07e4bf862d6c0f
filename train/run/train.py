"""A start of a run in this process: open everything, go through the steps, and leave everything as the next start needs it.

What wrong input can be found is found by `open_run`; `open_session` holds the directory and opens what is written; `Start` finds the
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
from ..generate.generate import sample_text
from ..generate.text import terminal_text
from ..processes.processes import barrier, shared_store
from ..processes.watch import Watch
from ..records.progress import Progress
from ..records.step_range import StepRange
from ..records.summary import describe_end, tokens_per_sample
from ..setup import Setup
from ..setup.feed import DeviceBatch, Feed
from ..setup.xla import open_devices
from ..step.state import State
from ..step.sync.phases import Exchanges
from ..verify.background import LayoutCheck
from .history import replace_config
from .hooks import Hooks
from .hooks.evaluator import Evaluator
from .identity import Resume
from .loop import Loop
from .opened import Opened, open_all
from .saves import Saves
from .session import Session, open_checkpoints, open_session
from .start import Compiling, Position, Start, with_scored_pairs


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
        # With the rules that were chosen for its program, which its directory keeps.
        run = opened.setup.run
        session = closing.enter_context(open_session(run, opened, watch, resume, profiled=profiled, begun=begun, entered=entered))
        with open_checkpoints(session, opened) as checkpoints:
            opened = with_scored_pairs(opened, session, has_begun=checkpoints.newest() > 0)
            records = session.records
            layout = closing.enter_context(contextlib.closing(LayoutCheck(run, records.event, records.alert, watch.request)))
            watch.begin_unlimited("comparing the layout with one device")
            layout.begin(session.screen.say)
            feed = Feed(opened.data, opened.setup)
            _say_notes(opened, feed, session)
            # XLA compiles the step while the state is found.
            compiling = None if _has_ended(opened, checkpoints) else Compiling(opened.setup, session)
            position = Start(opened.setup, opened.data.fingerprint, session.phase, session.screen.say).position(checkpoints, resume)
            opened, ended_at = _gone_back(opened, session, position)
            first, trains = time.perf_counter(), position.step < (opened.setup.run.steps if ended_at is None else ended_at)
            inputs = _inputs(opened, session, feed, position, compiling) if trains else None
            loop = _loop(opened, session, checkpoints, feed, layout, position, ended_at)
            if inputs is not None:
                loop.train(*inputs)
                session.screen.say(f"Checkpoint of step {loop.position.step} in {run.config.run.checkpoints}")
            else:
                loop.train_nothing()
                _say_how_to_go_on(loop)
            _conclude(loop)
            if loop.position.step > position.step:
                _say_summary(loop, time.perf_counter() - first)
    is_done = loop.position.step >= loop.last_step
    if on_end is not None:
        on_end(loop.setup, loop.position, is_done)
    return session.exit_code(Exit.DONE if is_done else stopped_code)


def _say_notes(opened: Opened, feed: Feed, session: Session) -> None:
    setup, data = opened.setup, opened.data
    for note in data.notes:
        session.screen.say(note)
    count = data.eval_sequences
    if count and feed.eval_batch != setup.run.config.train.batch:
        session.screen.say(f"An evaluation reads {count} samples in batches of {feed.eval_batch}, so that few are left out")
    elif count and setup.objective.is_of_whole_batches:
        session.screen.say("An evaluation reads whole batches only, because the loss compares their rows")


def _has_ended(opened: Opened, checkpoints: Checkpoints) -> bool:
    """Whether the newest checkpoint is of the last step, as far as its files can be read."""
    newest, evaluations = checkpoints.newest(), opened.evaluations
    return newest >= opened.setup.run.steps or (evaluations is not None and evaluations.begin(newest))


def _gone_back(opened: Opened, session: Session, position: Position) -> tuple[Opened, int | None]:
    """Takes data, exports and records back to the position from which this start trains.

    Returns the run with its number of steps, and the step at which it has ended early, if it has.
    """
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
    return replace(opened, setup=setup), ended_at


def _inputs(
    opened: Opened, session: Session, feed: Feed, position: Position, compiling: Compiling | None
) -> tuple[jax.stages.Compiled, Exchanges | None, Iterator[DeviceBatch]]:
    """The compiled step, the compiled exchanges, and the training batches from the position on. Stores this start's config as the run's."""
    _replace_config(opened, session, position.step)
    compiling = compiling or Compiling(opened.setup, session)
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


def _loop(
    opened: Opened,
    session: Session,
    checkpoints: Checkpoints,
    feed: Feed,
    layout: LayoutCheck,
    position: Position,
    ended_at: int | None,
) -> Loop:
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
        ended_at=ended_at,
    )


def _replace_config(opened: Opened, session: Session, step: int) -> None:
    """Stores the config of this start, which trains, as the run's."""
    change = replace_config(opened.setup.run, opened.data.fingerprint, step) if session.lock is not None else None
    if change is not None:
        session.records.event("config", time.time(), 0.0, **change.to_json())
        session.screen.say(change.text)


def _say_how_to_go_on(loop: Loop) -> None:
    step, epochs = loop.position.step, loop.setup.run.config.train.epochs
    longer = f"train.steps={step * 2}" if epochs is None else f"train.epochs={epochs * 2:g}"
    more = f"To train further, raise {longer.partition('=')[0]}, for example {longer}"
    if loop.ended_at is None:
        loop.session.screen.say(f"Already at step {step} of {loop.num_steps}. {more}")


def _conclude(loop: Loop) -> None:
    """Says how the run ended, and finishes what belongs to its last step."""
    session, position = loop.session, loop.position
    is_done = position.step >= loop.last_step
    _describe_evaluations(loop)
    if not is_done:
        why = session.watch.stop_signal or "a signal to another process"
        session.screen.say(f"Stopped at step {position.step} of {loop.num_steps} by {why}; the same command resumes from there")
    elif loop.setup.run.config.sample.tokens:
        _sample(loop, position.state)
    if is_done and session.exports.are_asked_for:
        if loop.ended_at is not None:
            # Its last step may have been saved before it was known to be the last.
            session.exports.begin(position.step, position.kept.id)
        _finish_exports(session)
    why = "done" if is_done else session.watch.stop_signal or "peer"
    lost = {"lost": lost} if (lost := session.lost()) else {}
    session.records.stop(step=position.step, why=why, **lost)


def _describe_evaluations(loop: Loop) -> None:
    evaluations, session = loop.evaluator.evaluations, loop.session
    if evaluations is None or session.lock is None:
        return
    if loop.ended_at is not None:
        more = "To train further, raise its patience, or set train.stop_early=null"
        session.screen.say(f"{evaluations.describe_end(loop.position.step, loop.num_steps)}. {more}")
    if (line := evaluations.describe_best()) is not None:
        session.screen.say(line)


def _sample(loop: Loop, state: State) -> None:
    with loop.session.phase("sample"):
        text = sample_text(loop.setup, state, loop.feed.data)
    loop.session.records.sample(text)
    loop.session.screen.say(f"Sample (temperature {loop.setup.run.config.sample.temperature}):\n{terminal_text(text)}")


def _finish_exports(session: Session) -> None:
    """Returns when the first process has written all exports."""
    session.watch.begin_unlimited("exporting the model")
    if session.lock is not None:
        session.exports.finish()
    barrier("exports")


def _say_summary(loop: Loop, seconds: float) -> None:
    if loop.session.lock is None:
        return
    tokens, samples = tokens_per_sample(loop.setup.batch_shapes), loop.position.samples
    tokens = None if tokens is None else tokens * samples
    for line in describe_end(loop.setup.run.config.run.path, seconds=seconds, tokens=tokens, samples=samples):
        loop.session.screen.say(line)
