"""One machine as a run needs it: disk, shared memory, clock, port, driver and network. Needs no JAX."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from jgt import amount

_LEAST_FREE, _LEAST_SHARED, _LEAST_FILES = 10e9, 1e9, 4096
_DRIVERS = {13: 580, 12: 525}
"""The oldest drivers for wheels of a CUDA version. https://docs.jax.dev/en/latest/installation.html"""
_TIME_ERROR = 5
"""The state of adjtimex(2) for a clock that nothing keeps right."""
_MISMATCH = 18
"""NVML_ERROR_LIB_RM_VERSION_MISMATCH of nvml.h."""


class Diagnosis(NamedTuple):
    """A finding about a machine. state: `fault` keeps a run from working, `note` is worth knowing."""

    what: str
    state: Literal["ok", "note", "fault"]
    text: str


def _cuda_wheels() -> int | None:
    """The version of CUDA that the installed plugin of JAX is for."""
    for cuda in _DRIVERS:
        try:
            version(f"jax-cuda{cuda}-plugin")
        except PackageNotFoundError:
            continue
        return cuda
    return None


def _driver_code() -> int:
    """The answer of NVIDIA's driver to its own library; 0 if it is well. Raises OSError without the library."""
    return ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()


def _clock_state() -> int:
    # struct timex has less than 256 bytes; all of them 0 only asks.
    return ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) if sys.platform.startswith("linux") else 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The places that tell about a machine. folder: the run's. port: one that the run will listen at; None: not asked."""

    folder: Path = Path()
    port: int | None = None
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    driver: Callable[[], int] = _driver_code
    cuda: Callable[[], int | None] = _cuda_wheels
    clock: Callable[[], int] = _clock_state
    files: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @property
    def num_gpus(self) -> int:
        """The NVIDIA GPUs that the system shows."""
        return len([path for path in self.dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])

    def examine(self) -> Iterator[Diagnosis]:
        """Everything that was found, also what is well."""
        for look in (self._disk, self._shared, self._clock, self._port, self._files, self._gpus, self._network):
            yield from look()

    def _disk(self) -> Iterator[Diagnosis]:
        above = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        try:
            with tempfile.NamedTemporaryFile(dir=above):
                free = self.usage(above)[2]
        except OSError as error:
            yield Diagnosis("disk", "fault", f"{above}: cannot be written: {error.strerror or error}. Choose another run.dir")
            return
        few = f"{above}: only {amount(free, 'B')} are free. A checkpoint has about 12 bytes a parameter. Make room, or change run.dir"
        yield Diagnosis("disk", "fault", few) if free < _LEAST_FREE else Diagnosis("disk", "ok", f"{above}: {amount(free, 'B')} free")

    def _shared(self) -> Iterator[Diagnosis]:
        if self.num_gpus > 1 and (size := self.usage(self.dev / "shm")[0]) < _LEAST_SHARED:
            remedy = "NCCL needs more between GPUs: start the container with --shm-size=16g, or mount an emptyDir of medium Memory"
            yield Diagnosis("shared memory", "fault", f"{self.dev / 'shm'} has {amount(size, 'B')}. {remedy}")

    def _clock(self) -> Iterator[Diagnosis]:
        if time.time() < 1_700_000_000:
            yield Diagnosis(
                "clock", "fault", f"it says {time.strftime('%Y-%m-%d')}. TLS to buckets will fail. Set it, for example by chrony"
            )
        elif self.clock() == _TIME_ERROR:
            yield Diagnosis(
                "clock", "note", "nothing keeps it right (adjtimex). Machines of one run should agree to a second: chrony or ntpd"
            )
        else:
            yield Diagnosis("clock", "ok", "kept right by the system")

    def _port(self) -> Iterator[Diagnosis]:
        if self.port is None:
            return
        try:
            socket.create_server(("", self.port)).close()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            yield Diagnosis("port", "fault", f"{self.port}: {why}. Choose another port for --coordinator, or end what listens there")
        else:
            yield Diagnosis("port", "ok", f"{self.port} is free")

    def _files(self) -> Iterator[Diagnosis]:
        if (most := self.files()) < _LEAST_FILES:
            yield Diagnosis("open files", "note", f"at most {most:,}. Many files of data or processes need more: ulimit -n 65536")

    def _gpus(self) -> Iterator[Diagnosis]:
        cuda, count = self.cuda(), self.num_gpus
        if not count:
            lacks = "" if cuda else ", nor the plugin that plans for GPUs: pip install 'jgt[plan-gpu]'"
            cores = f"{os.cpu_count()} cores, no NVIDIA GPU{lacks}"
            can = "Virtual CPU devices train small models and verify layouts; for speed, memory and NCCL there is no substitute here"
            yield Diagnosis("GPUs", "note", f"{cores}. {can}")
            return
        if cuda is None:
            text = f"the system shows {count}, but JAX's plugin for CUDA is missing, so runs would use the CPU. pip install 'jgt[gpu]'"
            yield Diagnosis("GPUs", "fault", text)
        yield from self._of_driver(cuda)

    def _of_driver(self, cuda: int | None) -> Iterator[Diagnosis]:
        try:
            code = self.driver()
        except (OSError, AttributeError):
            remedy = "In a container, start it with the NVIDIA runtime (docker run --gpus all)"
            yield Diagnosis("driver", "fault", f"its library libnvidia-ml.so.1 is missing. {remedy}")
            return
        if code:
            why = (
                "the kernel has another version of it than its library: restart the machine" if code == _MISMATCH else f"NVML error {code}"
            )
            yield Diagnosis("driver", "fault", f"{why}. nvidia-smi says the same")
            return
        path = self.proc / "driver" / "nvidia" / "version"
        match = re.search(r"(\d{3,})\.[\d.]+", path.read_text() if path.is_file() else "")
        if match is not None and cuda is not None and int(match[1]) < _DRIVERS[cuda]:
            needs = f"the wheels for CUDA {cuda} need {_DRIVERS[cuda]} or newer. Update it, or install wheels for an older CUDA"
            yield Diagnosis("driver", "fault", f"{match[0]}: {needs}")
        else:
            yield Diagnosis("driver", "ok", match[0] if match else "answers")

    def _network(self) -> Iterator[Diagnosis]:
        # NCCL's own syntax: prefixes, ^ for all others, = for exact names.
        asked = self.environment.get("NCCL_SOCKET_IFNAME", "")
        names, wanted = [path.name for path in (self.sys / "class" / "net").glob("*")], asked.lstrip("^=").split(",")
        if asked and not asked.startswith("^") and not any(name.startswith(one) for name in names for one in wanted):
            has = f"this machine has {', '.join(sorted(names))}"
            yield Diagnosis("network", "fault", f"NCCL_SOCKET_IFNAME={asked} names no interface; {has}. Correct or unset it")
        for state in sorted((self.sys / "class" / "infiniband").glob("*/ports/*/state")):
            text, name = state.read_text().strip(), f"{state.parts[-4]} port {state.parts[-2]}"
            bad = Diagnosis(
                "InfiniBand", "fault", f"{name} is {text}. NCCL would use slower links. Look at its cable and its subnet manager"
            )
            yield Diagnosis("InfiniBand", "ok", f"{name} is active") if "ACTIVE" in text else bad
