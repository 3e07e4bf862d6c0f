"""The figures of a chip that measurements decide, and the chip that they make."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jgt.hardware.chip import Chip, Link, chip_of
from jgt.hardware.rates import AttentionRate, MatmulRate, MemoryRate, Rates

from .fit import Figures, Fit, Prior
from .measured import Measured

_STEP, _KERNEL = 0.08, 0.5
"""The relative error to expect of a step, and of a kernel measured alone, with the right figures."""
_NORMAL_90 = 1.645
_UNKNOWN, _SHAPE, _SHARE = 2.0, 0.7, 0.3
"""Widths of priors: of a peak about which nothing is known, of a size at half of the rate, and of a share of a data sheet's peak."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A chip by measurements. predicted: seconds by program. error: 90 % of steps are predicted within it, each by a fit of the others."""

    chip: Chip
    predicted: Mapping[str, float]
    error: float


def calibrate(start: Chip, measured: Sequence[Measured]) -> Calibrated:
    """The chip whose figures explain the measurements. start: its other figures, and priors of these."""
    programs = {one.name: one for one in measured}
    priors = _priors(start, measured)
    fit = Fit(
        lambda name, figures: programs[name].predicted(_with(start, figures)),
        {name: one.seconds for name, one in programs.items()},
        priors,
        {name: _STEP if one.kind == "step" else _KERNEL for name, one in programs.items()},
        looks=4,
    )
    chip = _with(start, fit.of(list(programs)))
    errors = [_error(start, fit, programs, name) for name, one in programs.items() if one.kind == "step"]
    error = math.exp(_NORMAL_90 * math.sqrt(sum(e**2 for e in errors) / len(errors))) - 1
    # All of these steps are of one host. On GPUs, pipelines are for several.
    kinds = ("one_host",) if start.error else ("one_host", "pipeline")
    chip = replace(chip, error={**start.error, **dict.fromkeys(kinds, round(error, 2))})
    return Calibrated(chip=chip, predicted={name: one.predicted(chip) for name, one in programs.items()}, error=error)


def _error(start: Chip, fit: Fit, programs: Mapping[str, Measured], name: str) -> float:
    """The error of a program, as a logarithm, by a fit of all others."""
    chip = _with(start, fit.of([other for other in programs if other != name]))
    return math.log(programs[name].predicted(chip) / programs[name].seconds)


def starting_chip(device: Any, devices: int) -> Chip:
    """What is known of a device before it is measured: a data sheet, or for a CPU the size of the machine's memory.

    devices: how many share the machine. Raises LookupError for a GPU without a chip file.
    """
    known = chip_of(device.device_kind)
    if known is not None:
        return known
    if device.platform != "cpu":
        raise LookupError(device.device_kind)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rate = MatmulRate(share=1.0, edge=16.0, depth=16.0, area=1e3)
    return Chip(
        name=device.device_kind,
        platform="cpu",
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


def _priors(start: Chip, measured: Sequence[Measured]) -> dict[str, Prior]:
    """The figures to fit. With a data sheet these are shares of its peaks; without, the peaks themselves."""
    has_sheet = start.platform != "cpu"
    found: dict[str, Prior] = {}

    def add(width: float, *keys: str) -> None:
        for key in keys:
            found[key] = Prior(value=_figure(start, key), width=width, why="the chip before its calibration")

    for dtype in start.rates.matmul:
        rate = f"rates.matmul.{dtype}"
        add(*((_SHARE, f"{rate}.share") if has_sheet else (_UNKNOWN, f"tflops.{dtype}")))
        add(_SHAPE, *(f"{rate}.{name}" for name in ("edge", "depth", "area")))
    add(*((_SHARE, "rates.memory.share") if has_sheet else (_UNKNOWN, "hbm_gbs")))
    add(_SHAPE, "rates.memory.half_mb", "rates.launch_us")
    if any(one.kind == "attention" for one in measured):
        add(_SHARE, "rates.attention.forward", "rates.attention.backward")
    if any(one.kind == "collective" for one in measured):
        # The devices of one machine. A network between machines keeps its figures.
        link = f"links.{next(iter(start.links))}"
        add(*((_SHARE, f"{link}.share") if has_sheet else (_UNKNOWN, f"{link}.gbs")))
        add(_SHAPE if has_sheet else _UNKNOWN, f"{link}.start_us", f"{link}.hop_us")
    if start.fresh_gbs is not None:
        add(_UNKNOWN, "fresh_gbs")
    return found


def _with(chip: Chip, figures: Figures) -> Chip:
    for key, value in figures.items():
        # A share above 1 would be a peak above the data sheet's.
        chip = _set(chip, key.split("."), min(value, 1.0) if key.endswith("share") else value)
    return chip


def _set(part: Any, path: Sequence[str], value: float) -> Any:
    """A dataclass or a mapping with one figure changed, by its dotted key."""
    if not path:
        return value
    name, *rest = path
    if isinstance(part, dict):
        inside = cast("dict[str, Any]", part)
        return {**inside, name: _set(inside[name], rest, value)}
    return replace(part, **{name: _set(getattr(part, name), rest, value)})


def _figure(chip: Chip, key: str) -> float:
    found: Any = dataclasses.asdict(chip)
    for name in key.split("."):
        found = found[name]
    return float(found)
