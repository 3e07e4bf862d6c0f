"""The end of a start: how the run has ended, what belongs to its last step, and what was trained."""

from __future__ import annotations

from ..generate.generate import sample_text
from ..generate.text import terminal_text
from ..processes.processes import barrier
from ..records.summary import describe_end, tokens_per_sample
from ..step.state import State
from .loop import Loop
from .session import Session


def conclude(loop: Loop, first: int, seconds: float) -> None:
    """Says how the run ended, and finishes what belongs to its last step. first: the step from which it has trained, for `seconds`."""
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
    if position.step > first and session.lock is not None:
        _summarize(loop, seconds)


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


def _summarize(loop: Loop, seconds: float) -> None:
    tokens, samples = tokens_per_sample(loop.setup.batch_shapes), loop.position.samples
    tokens = None if tokens is None else tokens * samples
    for line in describe_end(loop.setup.run.config.run.path, seconds=seconds, tokens=tokens, samples=samples):
        loop.session.screen.say(line)
