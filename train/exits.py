"""How a process of a run ends: what a scheduler, a launcher or a person reads from its exit code."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """The exit codes of `python -m train`; a signal's own are 128 + its number, as in a shell."""

    DONE = 0
    """All steps are done, or the run was asked to stop and its state is saved."""
    FAILED = 1
    """An error of this process."""
    INPUT = 2
    """The input is wrong; trying again is of no use."""
    HUNG = 3
    """No progress for too long."""
    PEER = 4
    """Another process of the run failed or is gone."""
