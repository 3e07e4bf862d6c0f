"""The effect of settings: plans of llama-1b.yaml with one or two changes, for a described GPU, without having one.

    python benchmarks/settings.py [ROW ...] [--target h200:1x1] [--preset none] [--json] [--save]

ms: the predicted time of a step. peak_gb: peak memory of the device. host_gb: offloaded to the host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plans import Planner, run

BASE = ["train.remat=none"]
ROWS = {
    "as it is": [],
    "model.attention: xla": ["model.attention=xla"],
    "model.attention: xla, train.remat: attention": ["model.attention=xla", "train.remat=attention"],
    "train.remat: matmuls": ["train.remat=matmuls"],
    "train.remat: block": ["train.remat=block"],
    "train.remat: [hidden, heads]": ["train.remat=[hidden, heads]"],
    "train.loss_chunks: 1": ["train.loss_chunks=1"],
    "train.accumulate: 2": ["train.accumulate=2"],
    "model.dtype: f32": ["model.dtype=f32"],
    "model.fp8: true": ["model.fp8=true"],
    "optimizer.moments: bf16": ["optimizer.moments=bf16"],
    "optimizer.offload: host": ["optimizer.offload=host"],
    "optimizer.name: muon": ["optimizer.name=muon"],
}
"""Row → overrides, in addition to BASE."""


def measure(name: str, planner: Planner) -> dict[str, Any]:
    """The plan of one row."""
    found = planner.plan("benchmarks/llama-1b.yaml", [*BASE, *ROWS[name]])
    memory = found["memory"]
    return {
        "ms": found["step_time_ms"],
        "tflop": found["flops_per_device"] / 1e12,
        "peak_gb": memory["peak_bytes"] / 1e9,
        "host_gb": memory["host_bytes"] / 1e9,
        "fits": memory["fits"],
    }


if __name__ == "__main__":
    run("settings", __doc__, ROWS, measure, target="h200:1x1")
