"""A training step of jgt, compared with the same model in plain JAX with every constraint written by hand.

    python benchmarks/step.py [--json] [--save] [--config benchmarks/step.yaml] [--steps 40] [--launches 3]
    python benchmarks/step.py --target h200:1x1 [key.sub=value ...]

The first command measures the time from launch to the end of the first step, with processes in turn, and the time of a step and of
tracing, in turn in one process; times are seconds and CPU-seconds. It also reports the temporary memory of both compiled steps, and whether
they contain the same collectives (kind, bytes, count). The second command compiles both steps for described GPUs, without having one
(extra plan-gpu), and reports the temporary and the peak memory of one device. Overrides change values of the config in both commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, alternate, bar, compared, make_parser, report, run_process

MOST = 1.01
"""The bar: jgt's step may take at most this multiple of the time and the temporary memory of the step written by hand."""


def main() -> None:
    """Runs the measurements and prints their figures."""
    parser = make_parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--config", default=str(ROOT / "benchmarks/step.yaml"))
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each program")
    parser.add_argument("--launches", type=int, default=3, help="launches of each program; 0: none")
    parser.add_argument("--target", metavar="CHIP:HOSTSxGPUS", help="compile for these GPUs and compare the memory, without measuring")
    arguments = parser.parse_args()
    try:
        report("step", planned(arguments) if arguments.target else measured(arguments), arguments)
    except FailedError as error:
        sys.exit(str(error))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements on the devices of this machine."""
    found: dict[str, Any] = {}
    if arguments.launches:
        commands = {name: _command(name, arguments) for name in ("jgt", "by_hand")}
        found["launch_to_first_step"] = compared(alternate(commands, arguments.launches))
    found |= run_process(_command("paired", arguments, "--steps", str(arguments.steps))).found
    ratio = {key: found["step"][f"{key}_ratio"]["median"] for key in ("s", "cpu_s")}
    found["bars"] = {f"step, {key}": bar(value, MOST) for key, value in ratio.items()}
    found["bars"]["temporary memory"] = bar(found["temp_bytes"]["ratio"], MOST)
    return found


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """The memory of both steps on described GPUs, without having one."""
    found: dict[str, Any] = run_process(_command("planned", arguments, "--target", arguments.target)).found
    return {"target": arguments.target, **found, "bars": {"temporary memory": bar(found["temp_bytes"]["ratio"], MOST)}}


def _command(name: str, arguments: argparse.Namespace, *options: str) -> Sequence[str]:
    return [sys.executable, "-m", "benchmarks.measure", *options, name, str(Path(arguments.config).resolve()), *arguments.overrides]


if __name__ == "__main__":
    main()
