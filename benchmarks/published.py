"""Layouts that others have published, planned with jgt's programs. By plan, without a GPU.

    python benchmarks/published.py [--json] [--save] [--preset none] [ROW ...]

Each row has the model, the mesh and the batch of a published run (runs.yaml), or of a test of one feature:

    mcore-70B       Megatron-Core: GPT 70B on 768 H100, replicas of 16-way ZeRO x 2 stages x tensor 8 (published: 2.18 s)
    sc21-145B       arXiv 2104.04473: GPT 145B on 1,536 A100, stage 8 x tensor 8 (published: 24.8 s)
    llama-8B        8 layers of Llama 3 8B, stage 2 x tensor 2 on one host
    titan-70B       torchtitan: Llama 3 70B on 256 H100, fsdp 32 x tensor 8 (published: 27.4 s); with overlap, and in eight bits
    llama-405B      Llama 3 405B on 512 H100, fsdp 8 x stage 8 x tensor 8
    toolbox-7B      JAX-Toolbox: Llama 2 7B on 8 H100 (published: 0.72 s)

    step            predicted seconds of a step
    peak            GiB of memory, and whether the step fits
    exposed         predicted seconds of waiting for collectives, by axis
    fsdp, tensor    GB that a device sends over these axes, f32 of it in brackets
    kept            GiB that the forward pass leaves for the backward pass

`--preset none` compiles without XLA's flags for overlap, which a run on GPUs has (`xla.preset`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plans import Planner, run
from jgt.document import InputError, Node, bind, read

LLAMA = "configs/llama-70b.yaml"
LLAMA_70B = ["mesh={data: 1, fsdp: 32, tensor: 8}", "train={steps: 1, batch: 512, remat: block}"]
LLAMA_8B = "{kind: llama, layers: 8, embed: 4096, heads: 32, kv_heads: 8, ffn: 14336, vocab: 128256, seq: 8192, dtype: bf16}"
LLAMA_405B = "{kind: llama, layers: 126, embed: 16384, heads: 128, kv_heads: 8, ffn: 53248, vocab: 128256, seq: 8192, dtype: bf16}"
_LEAST_MS = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run. step_s: its measured step. set: the sections of a run file for it. nic_gbs: of its network, if it is a slow one."""

    target: str
    step_s: float
    set: Node
    nic_gbs: float | None = None

    @property
    def overrides(self) -> list[str]:
        """The sections as overrides of a run file."""
        return [f"{name}={json.dumps(section.plain())}" for name, section in self.set.children.items()]

    @property
    def is_staged(self) -> bool:
        """Whether it has a pipeline."""
        return "pipeline" in self.set.children

    @property
    def row(self) -> tuple[str, str, Sequence[str]]:
        """As a row of this program."""
        return LLAMA, self.target, self.overrides


def read_runs(path: Path) -> dict[str, Run]:
    """The runs of a file. Raises InputError."""
    problems: list[str] = []
    runs = {name: bind(node, Run, problems) for name, node in read(path).children.items()}
    if problems:
        raise InputError(problems)
    return {name: run for name, run in runs.items() if run is not None}


RUNS = read_runs(Path(__file__).with_name("runs.yaml"))


def pipeline(schedule: str, microbatches: int, more: str = "") -> str:
    """A pipeline, as an override."""
    return f"pipeline={{signal: layers, axis: stage, schedule: {schedule}, microbatches: {microbatches}{more}}}"


ROWS: dict[str, tuple[str, str, Sequence[str]]] = {
    "mcore-70B": RUNS["mcore-70B"].row,
    "sc21-145B": RUNS["sc21-145B"].row,
    "llama-8B": (
        LLAMA,
        "h100:1x4",
        [
            f"model={LLAMA_8B}",
            "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}",
            "rules=rules/pipeline.yaml",
            pipeline("1f1b", 8, ", remat: layer"),
            "train={steps: 1, batch: 8}",
        ],
    ),
    "titan-70B": (LLAMA, "h100:32x8", [*LLAMA_70B, "rules=rules/fsdp_sequence.yaml"]),
    "titan-70B, overlap": (LLAMA, "h100:32x8", [*LLAMA_70B, "rules=rules/overlap.yaml"]),
    "titan-70B, fp8": (LLAMA, "h100:32x8", [*LLAMA_70B, "rules=rules/fsdp_sequence.yaml", "model.fp8=true"]),
    "llama-405B": (
        LLAMA,
        "h100:64x8",
        [
            f"model={LLAMA_405B}",
            "mesh={data: 1, fsdp: 8, stage: 8, tensor: 8}",
            "rules=rules/pipeline_sequence.yaml",
            pipeline("1f1b", 32, ", remat: layer"),
            "train={steps: 1, batch: 256}",
        ],
    ),
    "toolbox-7B": RUNS["toolbox-7B-8"].row,
}


def measure(name: str, planner: Planner) -> dict[str, Any]:
    """The figures of a row."""
    config, target, overrides = ROWS[name]
    plan = planner.plan(config, overrides, target)
    exposed = [f"{axis} {ms / 1e3:.2f}" for axis, ms in plan["exposed_ms"].items() if ms >= _LEAST_MS]
    return {
        "step_s": round(plan["step_time_ms"] / 1e3, 3),
        "peak_gib": f"{plan['memory']['peak_bytes'] / 2**30:.1f}{'' if plan['memory']['fits'] else ', does not fit'}",
        "exposed_s": ", ".join(exposed) or "none",
        "fsdp_gb": sent(plan, "fsdp"),
        "tensor_gb": sent(plan, "tensor"),
        "kept_gib": round(sum(plan["memory"]["activations"].values()) / 2**30, 1),
    }


def sent(plan: dict[str, Any], axis: str) -> str:
    """The GB that a device sends over an axis alone, and how much of it is in f32."""
    there = [c for c in plan["collectives"] if c["axes"] == [axis]]
    total, wide = (sum(c["total_bytes"] for c in cs) / 1e9 for cs in (there, [c for c in there if c["dtype"] == "f32"]))
    return f"{total:.1f} ({wide:.1f})"


if __name__ == "__main__":
    run("published", __doc__, ROWS, measure)
