"""`jgt calibrate`: measures this machine's devices, and writes what was found as a chip file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from jgt import CommandParser, MeshSizes
from jgt.document import InputError
from jgt.planner import Target


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: measured and written. 1: a program failed, or the file cannot be written. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.devices is not None and not 1 <= arguments.devices <= MeshSizes.MOST_DEVICES:
            raise InputError(
                [f"command line: --devices: must be a whole number from 1 to {MeshSizes.MOST_DEVICES:,}, not {arguments.devices}"]
            )
        import jax

        from jgt import use_virtual_cpu

        from .figures import calibrated, chip_text
        from .kernels import CPU_SIZES, GPU_SIZES, kernels, measure

        if arguments.devices is not None:
            use_virtual_cpu(arguments.devices)
        devices = cast("Sequence[Any]", jax.local_devices())
        start = Target.of_devices(devices[0].device_kind, len(devices))
        name = start.text.partition(":")[0]
        path = Path(arguments.write or f"{name}.yaml")
        if path.suffix != ".yaml":
            raise InputError([f"command line: --write: {path} must end with .yaml, as chip files do"])
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise InputError([f"command line: --write: the folder {path.parent} cannot be written"])
        sizes = CPU_SIZES if start.chip.platform == "cpu" else GPU_SIZES
        seconds = measure(kernels(devices, sizes), lambda line: print(line, file=sys.stderr, flush=True))
        path.write_text(chip_text(calibrated(start.chip, sizes, seconds, len(devices)), seconds, len(devices)))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"jgt calibrate: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path}")
    print(f"Use it: jgt plan run.yaml --target {path.stem.lower()}:1x{len(devices)} --chip {path}")
    return 0


def parser() -> CommandParser:
    """The command line of a calibration."""
    parser = CommandParser("jgt calibrate", "Measures this machine's devices, and writes a chip file for plans and searches.")
    parser.add_argument("--devices", type=int, metavar="N", help="measure N CPU devices; default: the devices that JAX finds")
    parser.add_argument("--write", metavar="FILE", help="the chip file to write; default: the chip's name, such as cpu.yaml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
