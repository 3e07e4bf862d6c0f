"""`jgt calibrate`: measures this machine's devices, and writes what was found as a chip file."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jgt.command.parser import CommandParser
from jgt.document import InputError, dump

from ..command_line import whole_number
from ..run.folder import write_whole

if TYPE_CHECKING:
    from .figures import Calibrated
    from .measured import Measured

_DIGITS = 5
"""Enough for the figures of data sheets, which the file keeps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: measured and written. 1: a program failed, or the file cannot be written. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        devices = measured_devices(arguments.devices)
        path = Path(arguments.write or f"{_chip_name(devices)}.yaml")
        if path.suffix != ".yaml":
            raise InputError([f"command line: --write: {path} must end with .yaml, as chip files do"])
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise InputError([f"command line: --write: the folder {path.parent} cannot be written"])
        measured, calibrated = _calibrate(devices)
        write_whole(path, chip_text(measured, calibrated, devices))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"jgt calibrate: {error}", file=sys.stderr)
        return 1
    name = path.stem.lower()
    print(f"Wrote {path}: steps are predicted to {calibrated.error:.0%} (90 % of them, each by a fit of the others)")
    print(f"Use it: jgt plan run.yaml --target {name}:1x{len(devices)} --chip {path}")
    return 0


def measured_devices(count: int | None) -> Sequence[Any]:
    """The devices to measure, opened with the flags of a run on them. count: of CPU devices; None takes what JAX finds."""
    import jax

    from ..config import Config
    from ..sections import DevicesConfig, XlaConfig
    from ..xla import configure_xla

    # The flags of a run, which matter on GPUs. The programs are compiled here, whatever is stored.
    for warning in configure_xla(Config(devices=DevicesConfig(virtual_cpu=count), xla=XlaConfig(cache=None))):
        print(warning, file=sys.stderr)
    if count is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return jax.local_devices()


def _chip_name(devices: Sequence[Any]) -> str:
    from jgt.hardware.chip import name_of

    kind = devices[0].device_kind
    found = name_of(kind) or ("cpu" if devices[0].platform == "cpu" else None)
    if found is None:
        raise InputError([f"jgt has no chip file for the device {kind}. Only CPU devices can be measured without one"])
    return found


def _calibrate(devices: Sequence[Any]) -> tuple[list[Measured], Calibrated]:
    """Measures all programs, a line on stderr each, and fits the figures."""
    from .figures import calibrate, starting_chip
    from .kernels import CPU, GPU, kernels
    from .measured import measure
    from .steps import steps

    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    programs = itertools.chain(kernels(devices, CPU if platform == "cpu" else GPU), steps(platform, devices))
    measured = measure(programs, lambda line: print(line, file=sys.stderr, flush=True))
    return measured, calibrate(starting_chip(devices[0], len(devices)), measured)


def chip_text(measured: Sequence[Measured], calibrated: Calibrated, devices: Sequence[Any]) -> str:
    """The chip file: its figures, with the measurements behind them as comments."""
    import jax

    chip, today = calibrated.chip, datetime.datetime.now().astimezone()
    lines = [
        f"# Measured by jgt calibrate on {today:%Y-%m-%d}: {len(devices)} x {chip.name}, jax {jax.__version__}.",
        "# 90 % of training steps are within the error below. Milliseconds of each program, measured and by these figures:",
    ]
    lines += [f"#   {one.seconds * 1e3:10.2f} {calibrated.predicted[one.name] * 1e3:10.2f}  {one.kind}: {one.name}" for one in measured]
    figures = _plain(dataclasses.asdict(chip))
    return "\n".join(lines) + "\n" + dump(figures)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with as many digits as they have, without those that are not there."""
    return dict(_kept(values))


def _kept(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield key, _plain(value)
        elif isinstance(value, float):
            yield key, float(f"{value:.{_DIGITS}g}")
        elif value not in (None, ""):
            yield key, value


def parser() -> CommandParser:
    """The command line of a calibration."""
    parser = CommandParser(
        "jgt calibrate", "Measures this machine's devices for about four minutes, and writes a chip file for plans and searches."
    )
    parser.add_argument("--devices", type=whole_number, metavar="N", help="measure N CPU devices; default: the devices that JAX finds")
    parser.add_argument("--write", metavar="FILE", help="the chip file to write; default: the chip's name, such as cpu.yaml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
