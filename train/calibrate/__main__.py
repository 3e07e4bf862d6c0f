"""`jgt calibrate`: measures this machine's devices, and writes what was found as a chip file."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jgt.command.parser import CommandParser
from jgt.document import InputError, dump
from jgt.hardware.chip import Chip, load_chip, name_of

from ..command_line import whole_number
from ..run.folder import write_whole

_DIGITS = 5
"""Enough for the figures of data sheets, which the file keeps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: measured and written. 1: a program failed, or the file cannot be written. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        devices = measured_devices(arguments.devices)
        name, start = _starting_chip(devices)
        path = Path(arguments.write or f"{name}.yaml")
        if path.suffix != ".yaml":
            raise InputError([f"command line: --write: {path} must end with .yaml, as chip files do"])
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise InputError([f"command line: --write: the folder {path.parent} cannot be written"])
        from .figures import calibrated
        from .kernels import CPU, GPU, kernels, measure

        sizes = CPU if start.platform == "cpu" else GPU
        seconds = measure(kernels(devices, sizes), lambda line: print(line, file=sys.stderr, flush=True))
        write_whole(path, chip_text(calibrated(start, sizes, seconds, len(devices)), seconds, len(devices)))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"jgt calibrate: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path}")
    print(f"Use it: jgt plan run.yaml --target {path.stem.lower()}:1x{len(devices)} --chip {path}")
    return 0


def measured_devices(count: int | None) -> Sequence[Any]:
    """The devices to measure, opened with the flags of a run on them. count: the number of CPU devices; None takes what JAX finds."""
    import jax

    from ..config import Config
    from ..run.xla import configure_xla
    from ..sections import DevicesConfig, XlaConfig

    # The flags of a run, which matter on GPUs. The programs are compiled here, whatever is stored.
    for warning in configure_xla(Config(devices=DevicesConfig(virtual_cpu=count), xla=XlaConfig(cache=None))):
        print(warning, file=sys.stderr)
    if count is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return jax.local_devices()


def _starting_chip(devices: Sequence[Any]) -> tuple[str, Chip]:
    """The name of the devices in a target, and what is known of them before they are measured. Raises InputError without a chip file."""
    from .figures import unmeasured_cpu

    kind = devices[0].device_kind
    if (name := name_of(kind)) is not None:
        return name, load_chip(name)
    if devices[0].platform == "cpu":
        return "cpu", unmeasured_cpu(len(devices), kind)
    raise InputError([f"jgt has no chip file for the device {kind}. Only CPU devices can be measured without one"])


def chip_text(chip: Chip, seconds: Mapping[str, float], devices: int) -> str:
    """The chip file: its figures, with the measurements behind them as comments."""
    lines = [
        f"# Measured by jgt calibrate on {datetime.date.today()}: {devices} x {chip.name}, jax {version('jax')}.",
        "# Microseconds of the work of each program:",
    ]
    lines += [f"#   {taken * 1e6:12,.1f}  {name}" for name, taken in seconds.items()]
    return "\n".join(lines) + "\n" + dump(dict(_plain(dataclasses.asdict(chip))))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Figures with as many digits as they have, without those that are not there."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield key, dict(_plain(value))
        elif isinstance(value, float):
            yield key, float(f"{value:.{_DIGITS}g}")
        elif value not in (None, ""):
            yield key, value


def parser() -> CommandParser:
    """The command line of a calibration."""
    parser = CommandParser("jgt calibrate", "Measures this machine's devices, and writes a chip file for plans and searches.")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="measure N CPU devices; default: the devices that JAX finds")
    parser.add_argument("--write", metavar="FILE", help="the chip file to write; default: the chip's name, such as cpu.yaml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
