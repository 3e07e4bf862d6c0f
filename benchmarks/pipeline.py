"""What a pipeline costs: against the unpipelined step, against the bubble alone, and one schedule against another.

    python benchmarks/pipeline.py [--json] [--steps 10] [--only NAME ...]

The model is that of step.yaml: a llama block of width 256, 4 layers, batch 16, sequence 256, f32, each layer recomputed. Each row runs
in a process of its own, in which the programs take turns step by step; figures are medians.

    two_stages     stage 2 on 2 devices, 16 microbatches, against data 2 on the same devices; `bubble` is (M + S - 1) / M
    eight_devices  stage 2 x fsdp 2 x tensor 2 with 4 microbatches, stage 4 x fsdp 2 with 8, and fsdp_tensor without stages
    schedules      8 layers, sequence 128, stage 4 x tensor 2, 8 microbatches, remat none: every schedule against 1f1b
    compile        CPU-seconds to trace and compile, against gradient accumulation over as many parts
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("two_stages", "eight_devices", "schedules", "compile")


def main() -> None:
    """Runs the rows and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each program")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=ROWS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {row: measure(row, arguments.steps) for row in arguments.only}
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    for row, programs in results.items():
        print(row)
        for name, figures in programs.items():
            print(f"  {name:28} " + "  ".join(f"{key} {value}" for key, value in figures.items()))


def measure(row: str, num_steps: int) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.measure_pipeline", row, str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
