"""The figures of a chip that measured kernels decide: rates from large kernels, times of starts from small ones.

Each figure follows from one program or two in closed form. The sizes at which a rate is half of a large kernel's, the shares of fused
attention and the network between hosts keep the figures of the chip file, or the rough ones of a CPU.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import cast

from jgt.document import dump
from jgt.planner import Chip, Link, MatmulWork

from .kernels import Sizes

_DIGITS = 5
"""Enough for the figures of data sheets, which the file keeps."""


def calibrated(start: Chip, sizes: Sizes, seconds: Mapping[str, float], devices: int) -> Chip:
    """A chip with the measured figures. start: its other figures. With a data sheet, shares of its peaks change, or else the peaks.

    seconds: the seconds of the programs of `kernels.kernels`, by name.
    """
    has_sheet, chip, rates = start.platform != "cpu", start, start.rates
    for dtype, n in sizes.matmuls.items():
        name = {"f32": "tf32"}.get(dtype, dtype)
        rate, work = rates.matmul.get(name, rates.matmul["bf16"]), MatmulWork(dtype, 1, n, n, n)
        flops = work.flops / seconds[f"matmul {dtype}"] / (rate.of(work) / rate.share)
        if not has_sheet:
            chip = replace(chip, tflops={**chip.tflops, name: flops / 1e12 / rate.share})
        elif name in start.tflops:
            rates = replace(rates, matmul={**rates.matmul, name: replace(rate, share=min(flops / start.peak_flops(dtype), 1.0))})
    bandwidth = (8 * sizes.memory + rates.memory.half_mb * 1e6) / seconds["memory"]
    if has_sheet:
        rates = replace(rates, memory=replace(rates.memory, share=min(bandwidth / (start.hbm_gbs * 1e9), 1.0)))
    else:
        chip = replace(chip, hbm_gbs=bandwidth / 1e9 / rates.memory.share)
    if "launch" in seconds:
        rates = replace(rates, launch_us=seconds["launch"] * 1e6)
    links = start.links
    if "small all-gather" in seconds:
        name, link = next(iter(links.items()))
        links = {**links, name: _link(link, sizes, seconds, devices, has_sheet=has_sheet)}
    return replace(chip, rates=rates, links=links)


def _link(link: Link, sizes: Sizes, seconds: Mapping[str, float], devices: int, *, has_sheet: bool) -> Link:
    """The link between the devices of one machine."""
    small, large = sizes.sent
    longer = max(seconds["large all-gather"] - seconds["small all-gather"], 1e-9)
    rate = (large - small) * (devices - 1) / devices / longer
    # A permutation has a start and one hop, a gather a start and a hop to each other device.
    once = seconds["small collective-permute"]
    hop = max(seconds["small all-gather"] - once, 0.0) / max(devices - 2, 1)
    link = replace(link, start_us=max(once - hop, 0.0) * 1e6, hop_us=hop * 1e6)
    return replace(link, share=min(rate / (link.gbs * 1e9), 1.0)) if has_sheet else replace(link, gbs=rate / 1e9 / link.share)


def chip_text(chip: Chip, seconds: Mapping[str, float], devices: int) -> str:
    """The chip file: its figures, with the measurements behind them as comments."""
    lines = [
        f"# Measured by jgt calibrate on {datetime.date.today()}: {devices} x {chip.name}, jax {version('jax')}.",
        "# Microseconds of the work of each program:",
    ]
    lines += [f"#   {taken * 1e6:12,.1f}  {name}" for name, taken in seconds.items()]
    return "\n".join(lines) + "\n" + dump(dict(_plain(asdict(chip))))


def _plain(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Figures with as many digits as they have, without those that are not there."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield key, dict(_plain(cast(dict[str, object], value)))
        elif isinstance(value, float):
            yield key, float(f"{value:.{_DIGITS}g}")
        elif value not in (None, ""):
            yield key, value
