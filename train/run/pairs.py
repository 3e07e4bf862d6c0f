"""Pairs of answers to train on, with the log-probabilities that the model before the first step gives them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from jgt.document import InputError

from ..evaluate.reference import SCORES, checksum, reference_of, with_reference
from ..settings.training import DPO
from ..step.state import State, digest_of_arrays
from .opened import Opened
from .session import Session
from .start import Start


def with_scored_pairs(opened: Opened, session: Session, *, has_begun: bool) -> Opened:
    """The run, whose pairs of answers have their log-probabilities under the model before the first step; with `Kept.reference`.

    Raises InputError if they have to be computed again, and the run would begin with another model now.
    """
    setup, data = opened.setup, opened.data
    if setup.run.config.train.loss != DPO or not data.pairs:
        return opened
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

    with session.phase("eval", step=0, what="reference"):
        session.watch.begin_unlimited("scoring pairs of answers with the model before the first step")
        data = with_reference(setup, data, first, session.screen.say, has_begun=has_begun)
    return replace(opened, data=data, reference={**known, "sha256": checksum(file)})
