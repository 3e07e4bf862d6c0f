"""How much GPU memory the loss in chunks and offloading to the host save: plans of a step without and with them. Needs no GPU.

    python benchmarks/memory.py [ROW ...] [--target h200:1x1] [--preset none] [--json] [--save]

The peaks are XLA's figures. saved_gb: the difference between the two peaks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plans import Planner, run

LAYERS = "{axes: {batch: [data]}, signals: {'layers/*': {save: {'*': %s}}}, default: replicate}"
KEPT, MOVED = (["train.remat=none", f"rules={LAYERS % where}"] for where in ("keep", "offload"))
LONG = ["model.seq=8192", "train.batch=24"]
ROWS = {
    "loss, vocabulary 32k": ([*LONG, "train.loss_chunks=1"], LONG),
    "loss, vocabulary 128k": ([*LONG, "model.vocab=128256", "train.loss_chunks=1"], [*LONG, "model.vocab=128256"]),
    "moments f32": ([], ["optimizer.offload=host"]),
    "moments bf16": (["optimizer.moments=bf16"], ["optimizer.moments=bf16", "optimizer.offload=host"]),
    "muon": (["optimizer.name=muon"], ["optimizer.name=muon", "optimizer.offload=host"]),
    "activations": (KEPT, MOVED),
    "activations and moments": (KEPT, [*MOVED, "optimizer.offload=host"]),
}
"""Row → the overrides of the baseline, and those of the plan that saves memory."""


def measure(name: str, planner: Planner) -> dict[str, Any]:
    """The peak of both plans, whether each fits, and the host memory of the second."""
    before, after = (planner.plan("benchmarks/llama-1b.yaml", overrides)["memory"] for overrides in ROWS[name])
    peaks = [one["peak_bytes"] / 1e9 for one in (before, after)]
    return {
        "peak_gb": peaks[0],
        "fits": before["fits"],
        "then_gb": peaks[1],
        "then_fits": after["fits"],
        "saved_gb": peaks[0] - peaks[1],
        "on_host_gb": after["host_bytes"] / 1e9,
    }


if __name__ == "__main__":
    run("memory", __doc__, ROWS, measure, target="h200:1x1")
