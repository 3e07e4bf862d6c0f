"""Predicted steps, compared with measured ones on this machine's CPU devices, by a chip file that `jgt calibrate` has written.

    jgt calibrate --devices 8 --write runs/cpu.yaml
    python benchmarks/calibrated.py [--json] [--save] [--chip runs/cpu.yaml]

A calibration measures kernels and no steps. Each step is measured in several rounds, and the fastest round counts.

    error           (predicted - measured) / measured
    order           Kendall's tau of predicted and measured steps
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, make_parser, report, table
from jgt.document import InputError
from jgt.mesh.mesh import use_virtual_cpu
from jgt.planner.hardware.target import Target
from train.config import Run, load
from train.plan.make import make_plan
from train.plan.trial import MeasuredStep

DEVICES, ROUNDS = 8, 4

_SMALL = {"kind": "gpt", "layers": 4, "embed": 128, "heads": 4, "vocab": 512, "seq": 128}
_MIDDLE = {"kind": "llama", "layers": 8, "embed": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "vocab": 1024, "seq": 128}
_LARGE = {"kind": "gpt", "layers": 4, "embed": 512, "heads": 8, "vocab": 2048, "seq": 256}
_ONE_F = {"signal": "layers", "schedule": "1f1b", "microbatches": 8}
_INTERLEAVED = {"signal": "layers", "schedule": "interleaved", "microbatches": 4, "virtual": 2}


def _run(
    model: Mapping[str, Any], mesh: Mapping[str, int], rules: str, pipeline: Mapping[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """The sections of a run's file."""
    staged = {} if pipeline is None else {"pipeline": pipeline}
    return {"model": model, "mesh": mesh, "rules": f"jgt:{rules}", "train": {"steps": 1, "batch": 32, **train}, **staged}


ROWS: dict[str, dict[str, Any]] = {
    "small, data 8": _run(_SMALL, {"data": 8}, "replicated"),
    "small, fsdp 4 x tensor 2": _run(_SMALL, {"data": 1, "fsdp": 4, "tensor": 2}, "fsdp_tensor", remat="block"),
    "small, data 2 x tensor 4": _run(_SMALL, {"data": 2, "tensor": 4}, "tensor"),
    "small, data 2 x stage 4": _run(_SMALL, {"data": 2, "fsdp": 1, "stage": 4, "tensor": 1}, "pipeline", _ONE_F),
    "middle, zero1 8": _run(_MIDDLE, {"data": 8}, "zero1"),
    "middle, fsdp 8": _run(_MIDDLE, {"fsdp": 8}, "fsdp", remat="block"),
    "middle, fsdp 2 x tensor 4": _run(_MIDDLE, {"data": 1, "fsdp": 2, "tensor": 4}, "fsdp_sequence"),
    "middle, data 4 x stage 2": _run(_MIDDLE, {"data": 4, "fsdp": 1, "stage": 2, "tensor": 1}, "pipeline", _INTERLEAVED),
    "large, data 8": _run(_LARGE, {"data": 8}, "replicated", remat="block"),
    "large, fsdp 4 x tensor 2": _run(_LARGE, {"data": 1, "fsdp": 4, "tensor": 2}, "fsdp_tensor"),
    "large, data 2 x tensor 4": _run(_LARGE, {"data": 2, "tensor": 4}, "tensor"),
    "large, fsdp 4 x stage 2": _run(_LARGE, {"data": 1, "fsdp": 4, "stage": 2, "tensor": 1}, "pipeline", _INTERLEAVED),
}


def measured(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """The seconds of a step of each run, in each round. Runs that do not compile are left out."""
    steps: dict[str, MeasuredStep] = {}
    for name, run in runs.items():
        try:
            steps[name] = MeasuredStep(run, cast("Sequence[Any]", jax.local_devices()))
        except (ValueError, NotImplementedError) as error:
            say(f"{name}: {str(error).splitlines()[0]}")
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(1, ROUNDS + 1):
        for name, step in steps.items():
            rounds[name].append(step.seconds())
            say(f"round {number} of {ROUNDS} {rounds[name][-1] * 1e3:10.2f} ms  {name}")
    return rounds


def say(line: str) -> None:
    """Prints a line of progress."""
    print(line, file=sys.stderr, flush=True)


def compare(target: Target, folder: Path) -> dict[str, Any]:
    """Measures all rows, and compares them with their predictions."""
    runs: dict[str, Run] = {}
    for number, (name, document) in enumerate(ROWS.items()):
        path = folder / f"{number}.yaml"
        # JSON is YAML.
        path.write_text(json.dumps({**document, "devices": {"virtual_cpu": DEVICES}}))
        runs[name] = load(str(path))
    rounds = measured(runs)
    seconds = [min(rounds[name]) for name in runs]
    predicted = [_predicted(run, target) for run in runs.values()]
    errors = [p / s - 1 for p, s in zip(predicted, seconds, strict=True)]
    return {
        "error": round(sum(map(abs, errors)) / len(errors), 3),
        "order": round(kendall(predicted, seconds), 3),
        "rows": [
            {
                "run": name,
                "rounds": " ".join(f"{s:.3f}" for s in rounds[name]),
                "measured": round(min(rounds[name]), 3),
                "predicted": round(p, 3),
                "error": f"{error:+.0%}",
            }
            for name, p, error in zip(runs, predicted, errors, strict=True)
        ],
    }


def _predicted(run: Run, target: Target) -> float:
    """The seconds of a step by its plan."""
    milliseconds = make_plan(run, target).to_json()["step_time_ms"]
    return milliseconds / 1e3 if isinstance(milliseconds, float) else math.nan


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau of two lists without equal values."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    agree = sum(1 if (one[a] < one[b]) == (other[a] < other[b]) else -1 for a, b in pairs)
    return agree / len(pairs)


def main() -> None:
    """Prints a line for each row, the mean error and the order, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--chip", default=str(ROOT / "runs" / "cpu.yaml"), help="the chip file of a calibration (runs/cpu.yaml)")
    arguments = parser.parse_args()
    use_virtual_cpu(DEVICES)
    try:
        target = Target.parse(f"{Path(arguments.chip).stem.lower()}:1x{DEVICES}", arguments.chip)
    except InputError as error:
        sys.exit("\n".join(error.problems))
    with tempfile.TemporaryDirectory() as folder:
        found = compare(target, Path(folder))
    report("calibrated", found, arguments, [*table(found["rows"]), *[f"{name}: {found[name]}" for name in ("error", "order")]])


if __name__ == "__main__":
    main()
