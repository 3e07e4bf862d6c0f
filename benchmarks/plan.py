"""How long `jgt plan` takes and how much memory, each plan in a process of its own.

    python benchmarks/plan.py [--json] [ROW ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

ROWS = {
    "quickstart, cpu": ["configs/quickstart.yaml"],
    "quickstart, h100:1x8": ["configs/quickstart.yaml", "--target", "h100:1x8"],
    "llama-8b, h100:1x8": ["configs/llama-8b.yaml", "--target", "h100:1x8"],
    "llama-70b, h100:32x8": ["configs/llama-70b.yaml", "--target", "h100:32x8"],
    "gpt-175b, h100:64x8": ["configs/gpt-175b.yaml", "--target", "h100:64x8"],
    "gpt-175b, 512 cpu devices": ["configs/gpt-175b.yaml"],
}


def main() -> None:
    """Prints a line a row, or one JSON object."""
    parser = argparse.ArgumentParser(description="Times jgt plan.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which: {'; '.join(ROWS)}")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {name: measure(ROWS[name]) for name in arguments.rows or ROWS}
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, row in found.items():
        print(f"{name:28} {row['s']:6.1f} s {row['cpu_s']:6.1f} CPU-s {row['peak_gb']:5.2f} GB   step {row['step_time_ms']} ms, {row['sent_gb']:.3g} GB sent")


def measure(config: list[str]) -> dict[str, Any]:
    """One plan: its seconds and memory, and what it says."""
    with tempfile.TemporaryFile("w+") as out:
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "jgt", "plan", "--config", *config, "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            raise SystemExit(f"jgt plan {' '.join(config)} failed")
        out.seek(0)
        plan = json.load(out)
    return {
        "s": round(seconds, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss / 1e6, 2),
        "step_time_ms": plan["step_time_ms"] and round(plan["step_time_ms"], 1),
        "sent_gb": sum(c["total_bytes"] for c in plan["collectives"]) / 1e9,
        "peak_bytes": plan["memory"]["peak_bytes"],
        "warnings": plan["warnings"],
    }


if __name__ == "__main__":
    main()
