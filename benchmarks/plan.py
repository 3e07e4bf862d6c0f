"""The time and the memory of `jgt plan`. Each plan runs in its own process.

python benchmarks/plan.py [--json] [--save] [--rounds 1] [ROW ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import FailedError, Sample, alternate, figures, make_parser, report, table

ROWS = {
    "quickstart, cpu": ["configs/quickstart.yaml"],
    "quickstart, h100:1x8": ["configs/quickstart.yaml", "--target", "h100:1x8"],
    "llama-8b, h100:1x8": ["configs/llama-8b.yaml", "--target", "h100:1x8"],
    "llama-70b, h100:32x8": ["configs/llama-70b.yaml", "--target", "h100:32x8"],
    "gpt-175b, h100:64x8": ["configs/gpt-175b.yaml", "--target", "h100:64x8"],
    "gpt-175b, 512 cpu devices": ["configs/gpt-175b.yaml"],
}


def main() -> None:
    """Prints a line for each row, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to plan (default: all): {'; '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often to plan each row, in turn")
    arguments = parser.parse_args()
    commands = {name: [sys.executable, "-m", "jgt", "plan", "--config", *ROWS[name], "--json"] for name in arguments.rows or ROWS}
    try:
        found = {name: measured(samples) for name, samples in alternate(commands, arguments.rounds).items()}
    except FailedError as error:
        sys.exit(str(error))
    report("plan", found, arguments, table([{"plan": name} | row for name, row in found.items()]))


def measured(samples: list[Sample]) -> dict[str, Any]:
    """Seconds and memory of planning, and the main figures of the plan itself."""
    plan = samples[-1].found
    return {
        **figures(samples),
        "step_time_ms": plan["step_time_ms"] and round(plan["step_time_ms"], 1),
        "sent_gb": round(sum(c["total_bytes"] for c in plan["collectives"]) / 1e9, 3),
        "planned_peak_gb": round(plan["memory"]["peak_bytes"] / 1e9, 2),
        "num_warnings": len(plan["warnings"]),
    }


if __name__ == "__main__":
    main()
