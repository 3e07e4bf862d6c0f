"""The bytes between the stages of a pipeline, compared with their formula, and the cost of schedules at scale. By plan, without a GPU.

    python benchmarks/stages.py [--json] [--save] [--preset none] [ROW ...]

The model is GPT-3 175B (configs/gpt-175b.yaml) on 64 A100: stage 8 x tensor 8, 64 microbatches of one sequence, each layer recomputed.
A part is what one of the 8 devices of a stage sends: the activation of a microbatch, 2048 x 12288 in bf16, divided by 8.

    forward, backward   parts that a device sends along the ring, divided by (microbatches x virtual + stages - 1)
    shown, shown back   parts that a device sends for each microbatch so that all stages see what leaves the last stage, and its cotangent
    moved               GB of weights and gradients that a device sends between stages besides
    wide                GB of f32 among all of these, without what is sent once a step
    step, ratio         predicted seconds of a step, and relative to 1f1b, if that is among the rows
    peak                GiB of memory
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plans import Planner, run

STAGES, TENSOR, MICROBATCHES = 8, 8, 64
PART = 2048 * 12288 * 2 // TENSOR
"""Bytes."""
ROWS = {
    "1f1b": ("1f1b", 1, 96),
    "interleaved 2": ("interleaved", 2, 96),
    "interleaved 3": ("interleaved", 3, 96),
    "zb": ("zb", 1, 96),
    "1f1b, 90 layers": ("1f1b", 1, 90),
    "interleaved 2, 90 layers": ("interleaved", 2, 90),
}
"""Row → schedule, chunks of a stage, and layers."""


def measure(name: str, planner: Planner) -> dict[str, Any]:
    """The figures of a schedule."""
    schedule, virtual, layers = ROWS[name]
    overrides = [
        f"mesh={{data: 1, fsdp: 1, stage: {STAGES}, tensor: {TENSOR}}}",
        f"train.batch={MICROBATCHES}",
        f"model.layers={layers}",
        f"pipeline.schedule={schedule}",
        f"pipeline.virtual={virtual if schedule == 'interleaved' else 'null'}",
    ]
    plan = planner.plan("configs/gpt-175b.yaml", overrides)
    between = [c for c in plan["collectives"] if c["axes"] == ["stage"] and c["signal"] == "pipeline"]
    ticks = MICROBATCHES * virtual + STAGES - 1

    def parts(kind: str, phase: str) -> float:
        return sum(c["total_bytes"] for c in between if (c["kind"], c["phase"]) == (kind, phase) and c["count"] > 1) / PART

    often = [c for c in between if c["count"] >= MICROBATCHES]
    return {
        "forward": round(parts("collective-permute", "forward") / ticks, 4),
        "backward": round(parts("collective-permute", "backward") / ticks, 4),
        "shown": round(parts("all-reduce", "forward") / MICROBATCHES, 3),
        "shown_back": round(parts("all-reduce", "backward") / MICROBATCHES, 3),
        "moved_gb": round(sum(c["total_bytes"] for c in between if c["count"] < MICROBATCHES) / 1e9, 2),
        "wide_gb": round(sum(c["total_bytes"] for c in often if c["dtype"] == "f32") / 1e9, 2),
        "step_s": round(plan["step_time_ms"] / 1e3, 2),
        "peak_gib": round(plan["memory"]["peak_bytes"] / 2**30, 1),
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds each step's ratio to that of 1f1b, if that is among the rows."""
    first = next((row["step_s"] for row in rows if row["row"] == "1f1b"), None)
    for row in rows if first else ():
        row["ratio"] = round(row["step_s"] / first, 3)


if __name__ == "__main__":
    run("stages", __doc__, ROWS, measure, target="a100:8x8", compare=compare)
