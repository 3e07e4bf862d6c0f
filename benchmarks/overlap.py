"""What `overlap: tensor` hides in Llama 3 70B on 256 H100, fsdp 32 x tensor 8. By plan, without a GPU.

    python benchmarks/overlap.py [--json] [--save] [--preset none] [ROW ...]

The batch has 512 sequences of 8192 tokens, and each layer is recomputed. Each row is planned twice: with the rules of overlap.yaml, and of
fsdp_sequence.yaml without rings.

    exposed    seconds of a step that a device waits for its tensor axis, without rings and with them, and their ratio
    step       predicted seconds of a step, likewise
    peak       GiB of memory, likewise
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plans import Planner, run

RULES = {"plain": "rules/fsdp_sequence.yaml", "rings": "rules/overlap.yaml"}
ROWS = {
    "512 sequences": ("train.batch=512",),
    "128 sequences": ("train.batch=128",),
    "64 sequences, remat matmuls": ("train.batch=64", "train.remat=matmuls"),
}


def measure(name: str, planner: Planner) -> dict[str, Any]:
    """The figures of a row."""
    plans = {kind: planner.plan("configs/llama-70b.yaml", [*ROWS[name], f"rules={path}"]) for kind, path in RULES.items()}
    exposed = {name: plan["exposed_ms"]["tensor"] / 1e3 for name, plan in plans.items()}
    return {
        **{f"exposed_{name}_s": round(seconds, 2) for name, seconds in exposed.items()},
        "ratio": round(exposed["rings"] / exposed["plain"], 3),
        **{f"step_{name}_s": round(plan["step_time_ms"] / 1e3, 2) for name, plan in plans.items()},
        **{f"peak_{name}_gib": round(plan["memory"]["peak_bytes"] / 2**30, 1) for name, plan in plans.items()},
    }


if __name__ == "__main__":
    run("overlap", __doc__, ROWS, measure, target="h100:32x8")
