"""The process beside a run that compares its layout, see `background.py`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import threading
import time
from pathlib import Path

from jgt.document import InputError

from ..config import load
from ..files.ends import Exit
from ..settings.code.files import Code
from .compare import compare_layouts
from .limits import Limits
from .small import small_run

_DEVICES = 8


def compare_beside(descriptor: int) -> int:
    """Compares the layout of the run in an open file, and prints the result as an object of JSON."""
    os.nice(19)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with contextlib.suppress(OSError):
        # If the machine has no memory left, this process goes first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    limits = Limits()

    def end(too_much: str) -> None:
        _print(None, f"it takes {too_much}")
        os._exit(0)

    with limits.watched(end):
        try:
            with os.fdopen(descriptor, "rb") as given:
                given.seek(0)
                root, files = pickle.load(given)
            run = load(root, code=Code(files=files), num_processes=None)
            num_split = sum(size != 1 for size in run.mesh.values())
            found = compare_layouts(small_run(run, max(_DEVICES, 2**num_split)), run)
            _print(found.is_right, str(found))
        except InputError as error:
            _print(None, error.problems[0])
    return Exit.DONE


def _print(ok: bool | None, message: str) -> None:
    print(json.dumps({"ok": ok, "message": message, "cpu_seconds": math.ceil(time.process_time())}), flush=True)


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock Python wants at its own end.
    while os.read(0, 1):
        pass
    os._exit(1)
