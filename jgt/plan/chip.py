"""Chips that a plan can be made for, as text files beside this one; what they are is published, not measured here."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from jgt.document import InputError, bind, nearest, read

_FOLDER = Path(__file__).parent / "chips"
_TARGET = re.compile(r"([\w.-]+?)(?::(\d+)x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of its peak that each part of a chip reaches in large operations."""

    matmul: float
    hbm: float
    link: float


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Microseconds: of a kernel, and of a collective inside a host and between hosts."""

    launch: float
    nvlink: float
    nic: float


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU and its links. tflops: dense peak by type, in TFLOP/s; *_gbs: GB/s, links in one direction and for one GPU.

    xla: the description that XLA compiles for (a GpuTargetConfigProto).
    """

    name: str
    tflops: dict[str, float]
    hbm_gb: float
    hbm_gbs: float
    nvlink_gbs: float
    nic_gbs: float
    efficiency: Efficiency
    latency_us: Latency
    xla: str

    def peak_flops(self, dtype: str) -> float:
        """Peak dense FLOP/s of a matmul of this element type; f32 runs in tf32, as XLA does by default."""
        name = "f8" if dtype.startswith("f8") else {"f16": "bf16", "f32": "tf32", "f64": "f64"}.get(dtype, "bf16")
        return self.tflops.get(name, self.tflops["bf16"]) * 1e12


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts of GPUs that need not be here."""

    chip: Chip
    text: str
    num_hosts: int
    per_host: int

    @property
    def num_devices(self) -> int:
        """All GPUs."""
        return self.num_hosts * self.per_host


def chip_names() -> list[str]:
    """The chips that are described."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@functools.cache
def load_chip(name: str) -> Chip:
    """A chip by its file's name. Raises InputError."""
    problems: list[str] = []
    chip = bind(read(_FOLDER / f"{name}.yaml"), Chip, problems)
    if problems:
        raise InputError(problems)
    return chip


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX names so (`NVIDIA H100 80GB HBM3`); None for one that is not described."""
    names = sorted(chip_names(), key=len, reverse=True)
    found = next((name for name in names if name.upper() in device_kind.upper()), None)
    return None if found is None else load_chip(found)


def parse_target(text: str) -> Target:
    """`h100:8x8`: 8 hosts of 8 H100. Raises InputError."""
    match = _TARGET.fullmatch(text.strip())
    name = match[1].lower() if match else text
    if name not in chip_names():
        raise InputError([f"--target {text}: there is no chip {name!r}. {nearest(name, chip_names())} Write CHIP:HOSTSxGPUS, such as h100:8x8"])
    if not match or match[2] is None or int(match[2]) < 1 or int(match[3]) < 1:
        raise InputError([f"--target {text}: say how many hosts, and GPUs on each: {name}:8x8 is 8 hosts with 8 GPUs"])
    return Target(chip=load_chip(name), text=f"{name}:{int(match[2])}x{int(match[3])}", num_hosts=int(match[2]), per_host=int(match[3]))
