"""A training step of jgt against the same model in plain JAX with every constraint written by hand.

    python benchmarks/step.py [--json] [--save] [--config benchmarks/step.yaml] [--steps 40] [--launches 3]
    python benchmarks/step.py --target h200:1x1 [key.sub=value ...]

The first line reports: CPU-seconds and seconds from launch to the end of the first step, in processes in turn; CPU-seconds and seconds
a step, in turn in one process; the same of tracing; the temporary memory of both compiled steps; and whether they hold the same
collectives (kind, bytes, count). The second compiles both for GPUs that need not be here (extra plan-gpu) and reports the temporary
and the peak memory of one device. Overrides change the file's values in all of it.
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
"""The bar: jgt's step takes at most so many times the time and the temporary memory of the one written by hand."""


def main() -> None:
    """Runs the measurements and prints their figures."""
    parser = make_parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--config", default=str(ROOT / "benchmarks/step.yaml"))
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each program")
    parser.add_argument("--launches", type=int, default=3, help="launches of each program; 0: none")
    parser.add_argument("--target", metavar="CHIP:HOSTSxGPUS", help="compile for these GPUs and compare memory; measures nothing")
    arguments = parser.parse_args()
    try:
        report("step", planned(arguments) if arguments.target else measured(arguments), arguments)
    except FailedError as error:
        sys.exit(str(error))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that is measured on the devices that are here."""
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
    """Memory on GPUs that need not be here."""
    found: dict[str, Any] = run_process(_command("planned", arguments, "--target", arguments.target)).found
    return {"target": arguments.target, **found, "bars": {"temporary memory": bar(found["temp_bytes"]["ratio"], MOST)}}


def _command(name: str, arguments: argparse.Namespace, *options: str) -> Sequence[str]:
    return [sys.executable, "-m", "benchmarks.measure", *options, name, str(Path(arguments.config).resolve()), *arguments.overrides]


if __name__ == "__main__":
    main()
