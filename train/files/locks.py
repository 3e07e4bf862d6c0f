"""Locks on files. The kernel releases one when its process dies, however it dies; a file that marks a lock would stay."""

from __future__ import annotations

import fcntl
from typing import IO


def lock(file: IO[bytes] | IO[str] | int, *, waits: bool = False, is_shared: bool = False) -> bool:
    """Locks an open file, or a descriptor, until it is closed. False: another process has locked it.

    waits: wait until the other process releases it. is_shared: other processes may take shared locks on it too. Raises OSError where the
    file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
