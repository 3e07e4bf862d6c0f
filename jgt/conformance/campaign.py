"""The side that asks: a worker's process, which may crash or hang, and what all answers add up to."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import IO, Any

_PATIENCE = 240
"""Seconds that an answer may take."""
_JOBS = 80
"""The answers of one process. Its caches of compiled operations grow to more than 1 GB meanwhile."""


def fast_flags() -> str:
    """XLA flags with which small programs compile fast. The partitioned programs are the same."""
    flags = "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # Later versions have no such flag.
    return flags + (" --xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib") < "0.11" else "")


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A worker that ended. trying: the program that it was compiling. reason: the last line that says why."""

    trying: Mapping[str, object]
    reason: str


class Asker:
    """Asks a worker, and starts another one when it has ended. through_jgt: it runs programs through `jgt.shard`.

    knowledge: what each new worker is told before its first job.
    """

    def __init__(self, knowledge: Callable[[], Mapping[str, object] | None] = lambda: None, *, through_jgt: bool = False):
        self._command = [sys.executable, "-W", "ignore", "-m", "jgt.conformance.worker", *(["--jgt"] if through_jgt else [])]
        self._knowledge = knowledge
        self._process: subprocess.Popen[str] | None = None
        self._jobs, self._ended, self._latest = 0, 0.0, 0.0

    @property
    def cpu(self) -> float:
        """The CPU seconds of all its processes so far."""
        return self._ended + self._latest

    def tell(self) -> None:
        """Tells the worker what is known now."""
        known = self._knowledge()
        if self._process is not None and known is not None:
            self.ask({"do": "know", **known})

    def ask(self, job: Mapping[str, object]) -> dict[str, Any] | Crash:
        """The answer to a job, or how the worker ended."""
        if self._process is None or self._jobs >= _JOBS:
            self.close()
            self._start()
        self._jobs += 1
        trying: Mapping[str, object] = {}
        assert self._process is not None and self._process.stdin is not None
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            while True:
                line = self._lines.get(timeout=_PATIENCE)
                if line is None:
                    break
                answer = json.loads(line)
                if "trying" not in answer:
                    self._latest = answer["cpu"]
                    return answer
                trying = answer
        except queue.Empty:
            return Crash(trying=trying, reason=self._end(f"no answer in {_PATIENCE} s"))
        except BrokenPipeError:
            pass
        return Crash(trying=trying, reason=self._end())

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._end("")

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process has ended
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_flags(), "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._jobs = 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        self.tell()

    def _end(self, reason: str = "") -> str:
        assert self._process is not None and self._process.stdin is not None
        self._process.kill()
        code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with self._errors:
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors if line.strip()]
        told = next((line for line in reversed(lines) if "Check failed" in line or "Error" in line), lines[-1] if lines else "")
        self._process, self._ended, self._latest = None, self._ended + self._latest, 0.0
        return reason or f"exit code {code}: {told[-300:]}"


def _read(pipe: IO[str], lines: queue.Queue[str | None]) -> None:
    with pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)


class Counts(Counter[str]):
    """The programs that were judged, by outcome."""

    def take(self, answer: Mapping[str, Any] | Crash) -> None:
        """Adds an answer."""
        if isinstance(answer, Crash):
            self.update(programs=1, crashed=1)
            return
        self.update(programs=answer["programs"], right=answer["right"], wrong=len(answer["wrong"]), refused=len(answer["refused"]))
        self["changed"] += answer["changed"]


def versions() -> dict[str, str]:
    """The versions of what is searched."""
    return {name: metadata.version(name) for name in ("jax", "jaxlib")}
