"""Which accelerators of this machine a process of a run gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jgt.document import InputError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(count: int, *, virtual: bool) -> list[dict[str, str]]:
    """The environment of each of `count` processes, with an equal share of the GPUs. Raises InputError where they cannot be shared.

    virtual: the processes have virtual CPU devices.
    """
    gpus = [] if virtual or count == 1 else _gpus(os.environ)
    if len(gpus) % count:
        fits = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise InputError([f"command line: --processes: {count} processes cannot share {len(gpus)} GPUs equally. These can: {fits}"])
    share = len(gpus) // count
    return [{**os.environ, **({_VISIBLE: ",".join(gpus[i * share : (i + 1) * share])} if gpus else {})} for i in range(count)]


def _gpus(environment: Mapping[str, str]) -> list[str]:
    if _VISIBLE in environment:
        # -1 hides all.
        return [name for name in environment[_VISIBLE].split(",") if name not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
