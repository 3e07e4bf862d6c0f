"""Checkpoints in one process."""

from train.checkpoint.checkpoint import Checkpoints


def saved(setup, state, folder):
    """The checkpoint of a state at step 1, saved below a folder and found there again."""
    checkpoints = Checkpoints(folder, setup.run.config.checkpoint)
    checkpoints.save(setup.to_save(state), 1, 16)
    checkpoints.wait()
    found, reports = checkpoints.find()
    checkpoints.close()
    assert reports == []
    return found
