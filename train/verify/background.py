"""The comparison of a run's layout beside the run, in a process of low priority on virtual CPU devices.

A layout that was never compared may compute wrong numbers, and nobody would see it. So the first process starts a child that compares it
while the run trains (`run.verify: auto`), or before the first step (`before`), once for each program, rules, mesh and compiler. No step
waits for the child, and whatever happens to it costs a line. Only what it finds ends the run, behind a checkpoint: the numbers so far are
the user's to judge.

The child (`child.py`) reads the run from a file that it inherits. It ends with its parent, however that ends: its stdin closes then.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from ..config import Run
from ..files.ends import EndError
from ..files.json_text import read_object
from ..files.streams import say
from ..processes.processes import failure_of_any, this_process
from .compare import is_verified
from .limits import Limits

WRONG = "wrong"
"""The word by which the first process asks all others to save and to end."""
_FEWEST_CORES = 3
_PAUSE, _LONGEST_SECONDS = 0.2, 1_000_000.0


class LayoutError(EndError):
    """The layout changes the numbers; the message has both, and where they begin to differ."""


class LayoutCheck:
    """The comparison beside one start of a run. event, alert: record one. ask: asks all processes for something (`Watch.request`).

    `begin` is called by all processes, before the first step, and `poll` before each; `close` at the end.
    """

    def __init__(self, run: Run, event: Callable[..., None], alert: Callable[[str, str], None], ask: Callable[[str], None]):
        self._run, self._event, self._alert, self._ask = run, event, alert, ask
        self._mode = run.config.run.verify
        if "verify" not in run.root.find("run").children:
            self._mode = os.environ.get("JGT_VERIFY", self._mode)
        self._child: subprocess.Popen[bytes] | None = None
        self._wrong = ""

    def begin(self, show: Callable[[str], None]) -> None:
        """Starts the comparison if the layout needs one, and with `before` waits for it. Raises LayoutError, on all processes."""
        is_first = this_process() == 0 and self._mode != "off"
        if is_first and jax.device_count() > 1 and not is_verified(self._run):
            if (why := self._obstacle()) is None:
                show(f"The layout is compared with one device, at small sizes, in a process beside this one (at most {Limits()})")
                self._start()
            else:
                show(f"The layout was never compared with one device: {why}")
        if self._mode == "before":
            while self._child is not None:
                time.sleep(_PAUSE)
                self.poll()
            # Not in a collective, which gives up after half a minute.
            self._wrong = failure_of_any("layout", self._wrong or None, _LONGEST_SECONDS) or ""
            if self._wrong:
                raise self.error()

    def poll(self) -> None:
        """Reports the end of the comparison, if it has ended."""
        if self._child is None or self._child.poll() is None:
            return
        code = self._child.returncode
        found = _read(self._closed())
        took = round(time.time() - self._begun, 3)
        self._event("layout", self._begun, 0.0, took=took, exit=code, **found)
        if found["ok"] is None:
            say(f"the layout was not compared with one device: {found['message']}. Training continues")
        elif found["ok"]:
            say(f"{found['message']} ({found['cpu_seconds']} CPU-seconds)")
        else:
            self._wrong = found["message"]
            self._alert("layout", self._wrong)
            self._ask(WRONG)

    def error(self) -> LayoutError:
        """The error that ends the run on each process."""
        more = "Checkpoints of this layout have such numbers. Change the rules or the mesh, or set run.verify: off"
        return LayoutError(f"{self._wrong or 'process 0 has found that the layout changes the numbers'}\n{more}")

    def close(self) -> None:
        """Ends a comparison that is under way. The next start begins it again."""
        if self._child is not None:
            say("the run ended before its layout was compared with one device. The next start begins the comparison again")
            self._child.kill()
            self._closed()

    def _closed(self) -> bytes:
        """The output of a child that has ended, or was killed."""
        assert self._child is not None
        self._child.communicate()
        self._child = None
        with self._output:
            self._output.seek(0)
            return self._output.read()

    def _obstacle(self) -> str | None:
        """Why there is no comparison; None if there is nothing in its way."""
        if self._run.code.objects:
            return "parts of it are objects of this process. jgt.verify compares them"
        cores = free_cores()
        if self._mode == "auto" and cores < _FEWEST_CORES:
            return f"{cores:.1f} cores are free, and run.verify: auto needs {_FEWEST_CORES}. jgt verify FILE compares it"
        return None

    def _start(self) -> None:
        self._begun, self._output = time.time(), tempfile.TemporaryFile()  # noqa: SIM115
        # XLA's flags are those of this run's devices.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        with tempfile.TemporaryFile() as given:
            # The trainer's own classes may have another name there, so the document and the files are all that it gets.
            pickle.dump((self._run.root, dict(self._run.code.files)), given)
            given.flush()
            command = [sys.executable, "-m", "jgt", "verify", str(self._run.root.file), "--beside", str(given.fileno())]
            try:
                self._child = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[given.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                say(f"the layout is not compared with one device: {error}. Training continues")


def _read(output: bytes) -> dict[str, Any]:
    """The result of a child, which is the last line that it has printed."""
    last = (output.decode(errors="replace").strip().splitlines() or ["it ended without a word"])[-1]
    found = read_object(last) or {}
    if {"ok", "message", "cpu_seconds"} <= found.keys():
        return found
    return {"ok": None, "message": f"its process ended: {last[:200]}", "cpu_seconds": None}


def free_cores() -> float:
    """The cores that this process may use and that nothing is running on, by the load of the last minute."""
    try:
        return max(0.0, len(os.sched_getaffinity(0)) - os.getloadavg()[0])
    except (AttributeError, OSError):
        return float(os.cpu_count() or 1)
