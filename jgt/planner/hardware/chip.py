"""Chips: the devices that a plan can be made for. Imports no JAX, so that a typo is answered at once.

Each chip is a YAML file in `chips/`: its data sheet's figures, the shares of the peaks that operations reach, and the description that XLA
compiles for. A user may bring a chip file, or change single figures, because clusters with the same GPUs have different networks.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jgt.document import Bound, InputError, Node, bind, nearest, override, read
from jgt.planner.hardware.rates import Amount, AttentionRate, AttentionWork, MatmulRate, MatmulWork, MemoryRate, Rates, Share

_FEW_ROWS = 16
CHIP_FOLDER = Path(__file__).parent / "chips"
CPU_KIND = "cpu"
"""The platform of CPU devices, and the name of their chip."""

Positive = Annotated[float, Bound(above=0)]
"""A figure that times are divided by."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices. Links are listed from the nearest devices outwards, and the last one connects all of them.

    gbs: GB/s in one direction for one device. domain: the devices that it connects: one host's, all, or a number of them, which may span
    several hosts. share: the share of gbs that large messages reach. start_us, hop_us: microseconds of a collective, and of each of its
    hops from one member to the next. low_us: microseconds of a hop in the low-latency protocol of small sums; None without one.
    """

    gbs: Positive
    domain: Literal["host", "all"] | int
    share: Share
    start_us: Amount
    hop_us: Amount
    low_us: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device and its links.

    platform: cuda is a GPU, for which XLA compiles from the description `xla`; cpu is a device of JAX on this machine. devices: how many
    devices the figures are for, where devices share a processor and its memory, as CPU devices do; None if each has its own. fresh_gbs:
    GB/s at which a run of a program gets its temporary memory, where that takes time: a CPU's system gives out pages when they are first
    written; None for devices whose allocator keeps its memory. tflops: dense peak by element type, in TFLOP/s. hbm_gb: memory in GB (1e9
    bytes). hbm_gbs: its bandwidth in GB/s. host_gbs: GB/s between the memories of host and device, in one direction. power_w: its limit of
    power; rated_w: the limit at which the rates were found; equal if neither is known. error: the error to expect of a step's time,
    relative to it, by kind of layout: one_host, several_hosts or pipeline. xla: the description that XLA compiles for, a
    GpuTargetConfigProto in text form; empty for a chip that XLA knows itself.
    """

    name: str
    tflops: dict[str, Positive]
    hbm_gb: Positive
    hbm_gbs: Positive
    host_gbs: Positive
    rates: Rates
    links: dict[str, Link]
    platform: Literal["cuda", "cpu"] = "cuda"
    devices: int | None = None
    fresh_gbs: Positive | None = None
    power_w: Positive = 1.0
    rated_w: Positive = 1.0
    error: dict[str, Amount] = field(default_factory=dict[str, float])
    xla: str = ""

    def peak_flops(self, dtype: str) -> float:
        """Peak dense FLOP/s of a matmul of this element type; f32 runs in tf32, as XLA does by default."""
        return self.tflops[self._type(dtype)] * 1e12

    def matmul_seconds(self, work: MatmulWork) -> float:
        """The time of a matmul whose operands are near."""
        name = self._type(work.dtype)
        rate = self.rates.matmul.get(name, self.rates.matmul["bf16"])
        peak = self.tflops[name] * rate.of(work)
        # A product of few rows needs no tensor cores: ordinary ones compute it as fast as memory gives them the matrix.
        if min(work.m, work.n) <= _FEW_ROWS and "f32" in self.tflops:
            peak = max(peak, self.tflops["f32"] * rate.share)
        return work.flops / (peak * 1e12 * self._clock)

    def attention_seconds(self, work: AttentionWork) -> float:
        """The time of a kernel of fused attention."""
        return work.flops / (self.tflops["bf16"] * 1e12 * self.rates.attention.of(work) * self._clock)

    def memory_seconds(self, num_bytes: int) -> float:
        """The time to read and write this many bytes of the device's memory."""
        return self.rates.memory.seconds(num_bytes, self.hbm_gbs * 1e9)

    def fresh_seconds(self, num_bytes: int) -> float:
        """The time to get this many bytes of temporary memory."""
        return 0.0 if self.fresh_gbs is None else num_bytes / (self.fresh_gbs * 1e9)

    @property
    def _clock(self) -> float:
        return math.sqrt(self.power_w / self.rated_w)

    def _type(self, dtype: str) -> str:
        # f8e4m3fn and f8e5m2 run at the same rate. Chips without f8 compute it in bf16.
        name = "f8" if dtype.startswith("f8") else {"f16": "bf16", "f32": "tf32", "f64": "f64"}.get(dtype, "bf16")
        return name if name in self.tflops else "bf16"


def chip_names() -> list[str]:
    """The names of all chips."""
    return sorted(path.stem for path in CHIP_FOLDER.glob("*.yaml"))


# Asked for with every logged step of a run, for its MFU.
@functools.cache
def load_chip(name: str) -> Chip:
    """A chip by its file's name. Raises InputError for a file that is not a description of a chip."""
    return _chip(read(CHIP_FOLDER / f"{name}.yaml"))


def read_chip(path: str | Path, changes: Sequence[str] = ()) -> Chip:
    """The chip of a file, with some of its figures changed, such as `hbm_gb=96`.

    `nic_gbs=25` is short for `links.nic.gbs=25`. Raises InputError with every problem.
    """
    problems: list[str] = []
    root = read(path)
    short = {f"{name}_gbs": f"links.{name}.gbs" for name in root.find("links").children}
    figures = [*short, *_figures(root)]
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key:
            problems.append(f"--set {change}: a figure of the chip is written KEY=VALUE, for example nic_gbs=25")
        elif key not in figures:
            known = f"{nearest(key, figures, lists=False)} Its figures: {', '.join(figures)}".lstrip()
            problems.append(f"--set {change}: the chip has no figure {key!r}. {known}")
        else:
            with InputError.collect(problems):
                root = override(root, f"{short.get(key, key)}={value}")
    return _chip(root, problems)


def _figures(node: Node) -> Iterator[str]:
    for child in node.children.values():
        if child.children:
            yield from _figures(child)
        elif isinstance(child.value, int | float):
            yield child.key


def _chip(root: Node, problems: Sequence[str] = ()) -> Chip:
    problems = list(problems)
    chip = bind(root, Chip, problems)
    if chip is None or problems:
        raise InputError(problems)
    return chip


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device, by JAX's `device_kind` (`NVIDIA H100 80GB HBM3`); None if no file describes it."""
    name = name_of(device_kind)
    return None if name is None else load_chip(name)


def name_of(device_kind: str) -> str | None:
    """The chip's name in a target, such as h100, by JAX's `device_kind`; None if no file describes it."""
    # The longest name first, should one be a part of another: GB200 and B200.
    names = sorted(chip_names(), key=len, reverse=True)
    same = next((name for name in names if load_chip(name).name == device_kind), None)
    return same or next((name for name in names if _plain(name) in _plain(device_kind)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def unmeasured_cpu(devices: int) -> Chip:
    """Rough figures of CPU devices that share this machine's processor and its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rate = MatmulRate(share=1.0, edge=16.0, depth=16.0, area=1e3)
    return Chip(
        name=CPU_KIND,
        platform=CPU_KIND,
        devices=devices,
        tflops={"tf32": 0.05, "bf16": 0.02},
        hbm_gb=round(memory / devices, 3),
        hbm_gbs=5.0,
        host_gbs=5.0,
        fresh_gbs=0.5,
        rates=Rates(
            matmul={"tf32": rate, "bf16": rate},
            attention=AttentionRate(forward=1.0, backward=1.0),
            memory=MemoryRate(share=1.0, half_mb=0.01),
            launch_us=3.0,
        ),
        links={"memory": Link(gbs=1.0, domain="all", share=1.0, start_us=100.0, hop_us=10.0)},
    )
