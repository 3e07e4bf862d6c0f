"""CPU-milliseconds of a step of generation, against transformers: one more token of every row of a batch.

python benchmarks/generation.py --transformers PYTHON [--json] [--save] [--rounds 7] [--rows 1 8]

A Llama of 19 million f32 parameters with random values continues prompts of 64 tokens greedily. PYTHON has torch and transformers. Both
programs run in a process each, on one core, and take turns. A step costs the CPU time of 65 new tokens less that of one, divided by 64, so
neither the prompts nor the start of a call count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, Sample, bar, compared, make_parser, report, turns

SIZES = {"layers": 6, "embed": 512, "heads": 8, "kv_heads": 4, "ffn": 640, "vocab": 8192, "seq": 512}
PROMPT, STEPS = 64, 64
BARS = {1: 1.0, 8: 1.2}


def main() -> None:
    """Prints the figures for each number of rows, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--transformers", metavar="PYTHON", required=True, help="an interpreter that has torch and transformers")
    parser.add_argument("--rounds", type=int, default=7, help="how often each program is measured (7)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="the rows of a batch (1 8)")
    arguments = parser.parse_args()
    pythons = {"jgt": sys.executable, "transformers": arguments.transformers}
    servers = {name: Server([python, str(ROOT / "benchmarks" / "peers" / f"{name}_generate.py")]) for name, python in pythons.items()}
    found: dict[str, Any] = {}
    for rows in arguments.rows:
        samples: dict[str, list[Sample]] = {name: [] for name in servers}
        for name, counts in turns(list(servers), arguments.rounds, 2):
            sample = servers[name].step(rows)
            samples[name] += [sample] if counts else []
        found[f"batch {rows}"] = values = compared(samples)
        if rows in BARS:
            values["bar"] = bar(values["cpu_s_ratio"]["median"], BARS[rows])
    report("generation", found, arguments)


class Server:
    """A program in a process of its own, on the last core."""

    def __init__(self, command: Sequence[str]):
        core = max(os.sched_getaffinity(0))
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def step(self, rows: int) -> Sample:
        """The seconds of one step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        seconds, cpu = json.loads(self._process.stdout.readline())
        return Sample(s=seconds, cpu_s=cpu)


def serve(generate: Callable[[int, int], Any]) -> None:
    """Measures a step of generate(rows, new tokens) for each number of rows on stdin."""
    for line in sys.stdin:
        taken = []
        for count in (1, 1 + STEPS):
            started, cpu = time.perf_counter(), time.process_time()
            generate(int(line), count)
            taken.append((time.perf_counter() - started, time.process_time() - cpu))
        print(json.dumps([(after - before) / STEPS for before, after in zip(*taken, strict=True)]), flush=True)


if __name__ == "__main__":
    main()
