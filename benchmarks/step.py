"""A training step of jgt against the same model in plain JAX with every constraint written by hand.

    python benchmarks/step.py [--json] [--config benchmarks/step.yaml] [--steps 40]

Reports, each in a fresh process: CPU-seconds and seconds from launch to the end of the first step (jgt and hand-written);
then, interleaved in one process: CPU-seconds and seconds a step, median, with the ratio; tracing time with the ratio;
and whether the two compiled steps hold the same collectives (kind, bytes, count).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ("jgt", "by_hand", "paired")


def main() -> None:
    """Runs the measurements and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "benchmarks/step.yaml"))
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each program")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {name: measure(name, arguments.config, arguments.steps) for name in MEASUREMENTS}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, figures in result.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:34} {value}")


def measure(name: str, config: str, num_steps: int) -> dict[str, Any]:
    """One measurement in its own process, which knows when it was launched."""
    command = [sys.executable, "-m", "benchmarks.measure", name, str(Path(config).resolve()), str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"LAUNCHED": str(time.time())}, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
