"""How a process of the trainer ends: its exit codes, and the failures that a run expects."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit codes of `jgt train`. A process killed by a signal has 128 + the signal's number, as in a shell."""

    DONE = 0
    """All steps are done, or the run was asked to stop and its state is saved."""
    FAILED = 1
    """An error of this process."""
    INPUT = 2
    """The input is wrong; another try would end the same way."""
    HUNG = 3
    """No progress for too long."""
    PEER = 4
    """Another process of the run failed or is gone."""
    UNJOINED = 5
    """The processes of the run have not found each other."""
    LOST = 6
    """As DONE, but some of what the run writes about itself could not be written."""


class EndError(Exception):
    """A failure that a run expects, such as a save that is impossible. The message says all. code: the exit code."""

    code = Exit.FAILED


class InUseError(EndError):
    """Another run is using this directory, or may be; the message names it."""
