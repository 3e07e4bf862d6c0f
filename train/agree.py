"""Processes of one run wait for each other, and start only with the same input."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgt.document import InputError


def agree(problems: Sequence[str], what: Any) -> None:
    """Returns when no process has a problem and all hold the same `what` (plain values). Raises InputError on all of them."""
    if jax.process_count() == 1:
        if problems:
            raise InputError(problems)
        return
    mine = np.array([len(problems), zlib.crc32(json.dumps(what, sort_keys=True, default=str).encode())], np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 2)
    if problems:
        raise InputError(problems)
    failed = np.flatnonzero(everyone[:, 0]).tolist()
    if failed:
        raise InputError([f"process {jax.process_index()}: stopped, because of what process {failed[0]} reports"])
    other = np.flatnonzero(everyone[:, 1] != mine[1]).tolist()
    if other:
        raise InputError(
            [f"process {jax.process_index()}: its config or its data differs from that of process {other[0]}. Give all processes the same"]
        )


def barrier(name: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
