"""How far predicted steps are from measured ones on this machine's CPU devices, by a chip file that `jgt calibrate` has written.

    jgt calibrate --devices 8 --write runs/cpu.yaml
    python benchmarks/calibrated.py [--json] [--save] [--chip runs/cpu.yaml]

A calibration measures other models, and mostly other layouts, than this benchmark. Steps are measured in the same way in both: each of them
in several rounds, and the fastest round counts.

    error           (predicted - measured) / measured
    order           Kendall's tau of predicted and measured steps
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT, bar, make_parser, report, table
from jgt.document import InputError
from jgt.hardware.chip import Chip, read_chip
from train.calibrate.__main__ import measured_devices
from train.calibrate.measured import measure
from train.calibrate.steps import step_of

DEVICES = 8
MOST_OFF, LEAST_ORDER = 0.15, 0.8

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


def compare(chip: Chip) -> dict[str, Any]:
    """Measures all rows, and compares them with their predictions."""
    devices = cast("Sequence[Any]", jax.local_devices())
    measured = measure(
        (step_of(name, document, devices) for name, document in ROWS.items()), lambda line: print(line, file=sys.stderr, flush=True)
    )
    seconds = [one.seconds for one in measured]
    predicted = [one.predicted(chip) for one in measured]
    errors = [p / s - 1 for p, s in zip(predicted, seconds, strict=True)]
    return {
        "bars": {
            "error": bar(sum(map(abs, errors)) / len(errors), MOST_OFF),
            "order": {"value": round(kendall(predicted, seconds), 3), "least": LEAST_ORDER},
        },
        "rows": [
            {
                "run": one.name,
                "rounds": " ".join(f"{s:.3f}" for s in one.rounds),
                "measured": round(one.seconds, 3),
                "predicted": round(p, 3),
                "error": f"{error:+.0%}",
            }
            for one, p, error in zip(measured, predicted, errors, strict=True)
        ],
    }


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau of two lists without equal values."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    agree = sum(1 if (one[a] < one[b]) == (other[a] < other[b]) else -1 for a, b in pairs)
    return agree / len(pairs)


def main() -> None:
    """Prints a line for each row and the figures that have a bar, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--chip", default=str(ROOT / "runs" / "cpu.yaml"), help="the chip file of a calibration (runs/cpu.yaml)")
    arguments = parser.parse_args()
    measured_devices(DEVICES)
    try:
        chip = read_chip(arguments.chip)
    except InputError as error:
        sys.exit("\n".join(error.problems))
    found = compare(chip)
    report("calibrated", found, arguments, [*table(found["rows"]), *[f"{name}: {value}" for name, value in found["bars"].items()]])


if __name__ == "__main__":
    main()
