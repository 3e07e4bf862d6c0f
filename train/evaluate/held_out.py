"""The evaluation of a run's own held-out data, as its training does it: the same program, batches and sums."""

from __future__ import annotations

from jgt.document import InputError

from ..command_line import say
from ..loaded import Loaded
from ..run.identity import Resume, check_data
from ..run.loop import held_out_means
from ..run.start import Feed
from ..run.train import opened_data


def evaluate_held_out(loaded: Loaded) -> dict[str, float]:
    """`eval_loss` and its like, and those of each part of a mixture. Raises InputError for a run that holds no data out."""
    setup = loaded.setup
    data = opened_data(setup.run)
    if not data.eval_parts:
        raise InputError([f"{setup.run.where('data')}: data: holds nothing out to evaluate on. Name texts with --text FILE"])
    try:
        check_data(setup.run, data.fingerprint, Resume())
    except InputError:
        say("the data is not what the run was trained with, so its losses are not those of training")
    feed = Feed(data, setup)
    step = setup.compile_eval_step(feed.eval_batch)
    return held_out_means(step, setup.stored_params(loaded.params), loaded.variables, setup, data, feed)
