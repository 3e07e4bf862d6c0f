"""All devices of a job add numbers, in processes of their own (`worker.py`), because a driver or a network may hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..processes.cluster import Cluster
from .machine import Diagnosis

_CODE = "import sys; from jgt.command.trainer import trainer; sys.exit(trainer('doctor.worker').main())"
_LAST_LINES, _CLOCKS_SECONDS = 6, 1.0
_MARGIN_SECONDS = 5.0


def ask_devices(clusters: Sequence[Cluster | None], environments: Sequence[Mapping[str, str]], seconds: float) -> Iterator[Diagnosis]:
    """Lets the devices of these processes add numbers, within some seconds."""
    started, end = list[subprocess.Popen[str]](), time.monotonic() + seconds
    try:
        for cluster, environment in zip(clusters, environments, strict=True):
            request = json.dumps({"cluster": cluster and asdict(cluster), "seconds": max(1.0, seconds - _MARGIN_SECONDS)})
            command, pipe = [sys.executable, "-c", _CODE, request], subprocess.PIPE
            started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True, start_new_session=True))
        for number, process in enumerate(started):
            name = "" if len(started) == 1 else f"process {number}: "
            try:
                out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                remedy = "A device, a driver or the network between machines hangs: set NCCL_DEBUG=INFO and see the page on fabrics"
                yield Diagnosis("all-reduce", "fault", f"{name}no answer within {seconds:.0f} s. {remedy}")
                return
            yield from diagnoses_in(name, process.returncode, out, err)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def diagnoses_in(name: str, code: int, out: str, err: str) -> Iterator[Diagnosis]:
    """The findings in the output of a process."""
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        yield Diagnosis("all-reduce", "fault", f"{name}ended with {why}: {_last(err)}")
        return
    devices = f"{name}{found['devices']} of {found['kind']}, {found['local']} here"
    if found["gpus"] and found["platform"] == "cpu":
        text = f"{devices}, although the system shows {found['gpus']} GPUs. JAX could not start them, or JAX_PLATFORMS hides them"
        yield Diagnosis("devices", "fault", f"{text}: {_last(err)}")
    else:
        yield Diagnosis("devices", "ok", devices)
    if abs(found["clock"]) > _CLOCKS_SECONDS:
        yield Diagnosis("clock", "fault", f"{name}{found['clock']:+.1f} s beside the first process's. Set it, for example by chrony")
    if not found["right"]:
        yield Diagnosis("all-reduce", "fault", f"{name}its sum is wrong. Test these GPUs before you train on them: dcgmi diag -r 3")
    elif found["devices"] > 1:
        yield Diagnosis("all-reduce", "ok", f"{name}{found['seconds'] * 1e3:.2f} ms, {found['gb_s']:.2f} GB/s by each device")
    if found["slowed"]:
        yield Diagnosis("GPUs", "fault", f"{name}slowed by {found['slowed']}. Look at cooling and power")


def _last(err: str) -> str:
    return " / ".join(err.strip().splitlines()[-_LAST_LINES:])[-600:] or "it said nothing"
