"""What offloading to the host's memory takes off a GPU: plans of a step with and without, by XLA's own figures. No GPU is needed.

    python benchmarks/offload.py [--target h200:1x1] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = str(Path(__file__).with_name("offload.yaml"))
LAYERS = "{axes: {batch: [data]}, signals: {'layers/*': {save: {'*': %s}}}, default: replicate}"
KEPT = ["train.remat=none", f"rules={LAYERS % 'keep'}"]
ROWS = {
    "moments f32": ([], ["optimizer.offload=host"]),
    "moments bf16": (["optimizer.moments=bf16"], ["optimizer.moments=bf16", "optimizer.offload=host"]),
    "muon": (["optimizer.name=muon"], ["optimizer.name=muon", "optimizer.offload=host"]),
    "activations": (KEPT, ["train.remat=none", f"rules={LAYERS % 'offload'}"]),
    "activations and moments": (KEPT, ["train.remat=none", f"rules={LAYERS % 'offload'}", "optimizer.offload=host"]),
}


def main() -> None:
    """Prints a line a row, or one JSON object."""
    parser = argparse.ArgumentParser(description="Plans steps with and without offloading.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which: {'; '.join(ROWS)}")
    parser.add_argument("--target", default="h200:1x1")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {name: measure(arguments.target, *ROWS[name]) for name in arguments.rows or ROWS}
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'offloaded':24} {'peak GB':>8} {'then':>8} {'falls by':>8} {'on host':>8}   share of it")
    for name, row in found.items():
        before, after, host = (row[key] / 1e9 for key in ("peak_bytes", "offloaded_peak_bytes", "host_bytes"))
        print(f"{name:24} {before:8.2f} {after:8.2f} {before - after:8.2f} {host:8.2f}   {(before - after) / host:.2f}")


def measure(target: str, plain: list[str], offloaded: list[str]) -> dict[str, Any]:
    """Peak bytes of the device without and with, and bytes in the host's memory."""
    before, after = (plan(target, overrides) for overrides in (plain, offloaded))
    return {"peak_bytes": before["peak_bytes"], "offloaded_peak_bytes": after["peak_bytes"], "host_bytes": after["host_bytes"]}


def plan(target: str, overrides: list[str]) -> dict[str, Any]:
    """The memory of one plan."""
    command = [sys.executable, "-m", "jgt", "plan", "--config", CONFIG, "--target", target, "--json", *overrides]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["memory"]


if __name__ == "__main__":
    main()
