"""The measurements of `pipeline.py`: `python -m benchmarks.measure_pipeline ROW STEPS` measures one row and prints JSON."""

from __future__ import annotations

import json
import sys
import time

import jax

from benchmarks.harness import figures, interleave, ratios
from benchmarks.measure import Bench, Stepper

CONFIG = "benchmarks/step.yaml"
RULES = "rules=../configs/rules/pipeline.yaml"


def mesh(**sizes: int) -> str:
    """The override that sets the mesh."""
    return f"mesh={json.dumps({'data': 1, 'fsdp': 1, 'stage': 1, 'tensor': 1} | sizes)}"


def pipeline(microbatches: int, schedule: str = "1f1b") -> str:
    """The override that sets the pipeline."""
    return f"pipeline={{signal: layers, schedule: {schedule}, microbatches: {microbatches}}}"


def schedules(*common: str) -> dict[str, list[str]]:
    """The overrides for each schedule. common: overrides that all of them share."""
    names = ("1f1b", "gpipe", "interleaved", "zigzag", "zb", "zb_interleaved")
    return {name: [RULES, *common, pipeline(8, name)] for name in names}


ROWS: dict[str, dict[str, list[str]]] = {
    "two_stages": {
        "data 2": ["devices.virtual_cpu=2", RULES, mesh(data=2)],
        "1f1b, stage 2": ["devices.virtual_cpu=2", RULES, mesh(stage=2), pipeline(16)],
    },
    "eight_devices": {
        "data 2 x fsdp 2 x tensor 2": [],
        "stage 2 x fsdp 2 x tensor 2": [RULES, mesh(fsdp=2, stage=2, tensor=2), pipeline(4)],
        "stage 4 x fsdp 2": [RULES, mesh(fsdp=2, stage=4), pipeline(8)],
    },
    "schedules": schedules("model.layers=8", "model.seq=128", "train.remat=none", mesh(stage=4, tensor=2)),
    "compile": {
        "accumulate 4": [RULES, mesh(fsdp=2, data=2, tensor=2), "train.accumulate=4"],
        "1f1b": [RULES, mesh(fsdp=2, stage=2, tensor=2), pipeline(4)],
    },
}


def main() -> None:
    """Measures one row and prints it."""
    row, num_steps = sys.argv[1], int(sys.argv[2])
    steps, steppers, found = {}, {}, {}
    for name, overrides in ROWS[row].items():
        bench = Bench(CONFIG, overrides)
        jax.clear_caches()
        started = time.process_time()
        steps[name], state = bench.ready("jgt")
        found[name] = {"compile_cpu_s": round(time.process_time() - started, 2)}
        steppers[name] = Stepper(steps[name], state, bench.batches, bench.setup.settings(1))
    first = next(iter(found))
    if row != "compile":
        samples = interleave(steppers, num_steps)
        for name, of in samples.items():
            temp = steps[name].memory_analysis().temp_size_in_bytes
            found[name] |= (
                figures(of) | ratios(of, samples[first]) | {"temp_mb": round(temp / 1e6, 1), "loss": round(steppers[name].loss, 6)}
            )
    for of in found.values():
        of["compile_cpu_s_ratio"] = round(of["compile_cpu_s"] / found[first]["compile_cpu_s"], 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
