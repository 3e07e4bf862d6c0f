"""Checkpoints in one process."""

from train.checkpoint.checkpoint import Checkpoints


def newest_of(checkpoints):
    """The newest whole step, and a line for each damaged step that was set aside to get to it."""
    search = checkpoints.search()
    return search.next(), search.reports


def saved(setup, state, folder):
    """The checkpoint of a state at step 1, saved below a folder and found there again."""
    checkpoints = Checkpoints(folder, setup.run.config.checkpoint)
    checkpoints.save(setup.to_save(state), 1, 16)
    checkpoints.wait()
    found, reports = newest_of(checkpoints)
    checkpoints.close()
    assert reports == []
    return found
