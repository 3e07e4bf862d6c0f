"""The held-out loss of each policy of `sync:` after as many tokens, by seed, and the curves.

    python benchmarks/sync.py [POLICY ...] [--steps N] [--seeds N] [--json] [--save]

A llama of 140 thousand parameters (2 layers, width 64, bytes) trains on the source of Python's standard library: 16 sequences of 64
tokens in a step, shared by 4 replicas, on 4 virtual CPU devices. `never` is one replica on its own, with its 4 sequences in a step. All
other policies see the same tokens in the same order. Evaluations read the same 24 batches of 16 sequences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, FailedError, bar, make_parser, report, run_process

POLICIES = {
    "every step": "{axis: replica}",
    "every step, bf16": "{axis: replica, wire: bf16}",
    "every step, int8": "{axis: replica, wire: int8}",
    "one step late": "{axis: replica, late: 1}",
    "every 10, mean": "{axis: replica, every: 10}",
    "every 10, mean, int8": "{axis: replica, every: 10, wire: int8}",
    "every 10, outer 0.7, momentum 0.9": "{axis: replica, every: 10, outer: {lr: 0.7, momentum: 0.9}}",
    "every 10, outer 1, momentum 0.5": "{axis: replica, every: 10, outer: {lr: 1.0, momentum: 0.5}}",
    "every 50, mean": "{axis: replica, every: 50}",
    "every 50, outer 0.7, momentum 0.9": "{axis: replica, every: 50, outer: {lr: 0.7, momentum: 0.9}}",
    "every 50, outer 1, momentum 0.5": "{axis: replica, every: 50, outer: {lr: 1.0, momentum: 0.5}}",
    "every 50, mean, 5 fragments": "{axis: replica, every: 50, fragments: 5}",
    "every 50, outer 1, momentum 0.5, 5 fragments": "{axis: replica, every: 50, fragments: 5, outer: {lr: 1.0, momentum: 0.5}}",
    "never": "",
}
MODEL = ("model.layers=2", "model.embed=64", "model.ffn=192", "model.seq=64", "train.remat=none")
QUIET = ("log=[]", "sample.tokens=0", "checkpoint.every=0", "data.eval_tokens=24576", "train.eval_batches=null", "rules=null")
INT8_BAR, GAP_BAR = 0.005, 0.5

Found = dict[str, Any]


def main() -> None:
    """Trains each policy with each seed, and prints the losses."""
    parser = make_parser(__doc__)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="; ".join(POLICIES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.policies) - set(POLICIES)):
        parser.error(f"unknown: {', '.join(unknown)}. Known: {'; '.join(POLICIES)}")
    try:
        report("sync", measured(arguments.policies or list(POLICIES), arguments), arguments)
    except FailedError as error:
        sys.exit(str(error))


def measured(policies: list[str], arguments: argparse.Namespace) -> Found:
    """By policy the last held-out losses, one for each seed, their mean, and the curve of the first seed."""
    curves: dict[str, list[dict[int, float]]] = {name: [] for name in policies}
    for seed in range(arguments.seeds):
        for name in policies:
            curves[name].append(held_out(POLICIES[name], arguments.steps, seed))
            print(f"{name}, seed {seed}: {' '.join(f'{loss:.4f}' for loss in curves[name][-1].values())}", file=sys.stderr, flush=True)
    losses = {name: [list(curve.values())[-1] for curve in found] for name, found in curves.items()}
    means = {name: statistics.mean(of) for name, of in losses.items()}
    found: Found = {name: {"losses": losses[name], "mean": means[name], "curve": curves[name][0]} for name in policies}
    return found | {"bars": _bars(means)}


def _bars(means: dict[str, float]) -> Found:
    found: Found = {}
    if {"every step", "every step, int8"} <= means.keys():
        found["int8"] = bar(abs(means["every step, int8"] - means["every step"]), INT8_BAR)
    if {"every step", "never", "every 10, mean"} <= means.keys():
        left = (means["every 10, mean"] - means["every step"]) / (means["never"] - means["every step"])
        found["share of the gap that every 10 leaves"] = bar(left, GAP_BAR)
    return found


def held_out(sync: str, steps: int, seed: int) -> dict[int, float]:
    """The held-out loss of a run, by step."""
    where = (f"sync={sync}", "mesh={replica: 4}", "devices.virtual_cpu=4", "train.batch=16")
    alone = ("mesh={data: 1}", "devices.virtual_cpu=1", "train.batch=4")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "train",
            "--config",
            str(ROOT / "configs/quickstart.yaml"),
            *MODEL,
            *QUIET,
            *(where if sync else alone),
        ]
        command += [f"train.steps={steps}", f"run.seed={seed}", f"train.eval_every={max(steps // 10, 1)}", f"run.dir={folder}/run"]
        run_process(command)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}


if __name__ == "__main__":
    main()
