"""The cost of a pipeline, compared with the unpipelined step and with the bubble alone, and of each schedule.

    python benchmarks/pipeline.py [--json] [--save] [--steps 10] [--only NAME ...]

The model is that of step.yaml: 4 llama blocks of width 256, batch 16, sequence 256, f32, each layer recomputed. Each row runs in its own
process, in which the programs take turns step by step. Ratios are to the first program of the row.

    two_stages     stage 2 with 16 microbatches, compared with data 2 on the same 2 devices; the bubble alone costs (M + S - 1) / M
    eight_devices  stage 2 x fsdp 2 x tensor 2 with 4 microbatches, stage 4 x fsdp 2 with 8, and fsdp_tensor without stages
    schedules      8 layers, sequence 128, stage 4 x tensor 2, 8 microbatches, remat none: every schedule compared with 1f1b
    compile        CPU-seconds to trace and compile, compared with gradient accumulation over as many parts
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import FailedError, make_parser, report, run_process, table

ROWS = ("two_stages", "eight_devices", "schedules", "compile")


def main() -> None:
    """Runs the rows and prints their figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each program")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=ROWS)
    arguments = parser.parse_args()
    try:
        found = {
            row: run_process([sys.executable, "-m", "benchmarks.measure_pipeline", row, str(arguments.steps)]).found
            for row in arguments.only
        }
    except FailedError as error:
        sys.exit(str(error))
    report("pipeline", found, arguments, _lines(found))


def _lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for row, programs in found.items():
        yield from table([{row: name} | dict(figures) for name, figures in programs.items()])


if __name__ == "__main__":
    main()
