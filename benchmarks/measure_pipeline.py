"""What `pipeline.py` measures, one row a process: `python -m benchmarks.measure_pipeline ROW STEPS` prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import jax

from benchmarks.measure import Bench

CONFIG = "benchmarks/step.yaml"
RULES = "rules=../configs/rules/pipeline.yaml"


def mesh(**sizes: int) -> str:
    """The override for a mesh."""
    return f"mesh={json.dumps({'data': 1, 'fsdp': 1, 'stage': 1, 'tensor': 1} | sizes)}"


def pipeline(microbatches: int, schedule: str = "1f1b") -> str:
    """The override for a pipeline."""
    return f"pipeline={{signal: layers, schedule: {schedule}, microbatches: {microbatches}}}"


def schedules(*common: str) -> dict[str, list[str]]:
    """Every schedule on one mesh."""
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
    """Prints one row."""
    row, num_steps = sys.argv[1], int(sys.argv[2])
    programs, compile_s = {}, {}
    for name, overrides in ROWS[row].items():
        bench = Bench(CONFIG, overrides)
        jax.clear_caches()
        started = time.process_time()
        programs[name] = (bench, *bench.jgt())
        compile_s[name] = time.process_time() - started
    found = {name: {"compile_cpu_s": round(seconds, 2)} for name, seconds in compile_s.items()}
    if row != "compile":
        found = {name: figures | found[name] for name, figures in timed(programs, num_steps).items()}
    first = next(iter(found))
    for figures in found.values():
        for key in ("cpu_s", "s", "compile_cpu_s"):
            if key in figures:
                figures[f"{key}_ratio"] = round(figures[key] / found[first][key], 3)
    print(json.dumps(found))


def timed(programs: dict[str, Any], num_steps: int) -> dict[str, dict[str, Any]]:
    """Seconds a step, the programs in turn, and their temporary memory."""
    states = {name: state for name, (_, _, state) in programs.items()}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    wall: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index in range(num_steps + 1):
        for name in list(programs)[:: 1 if index % 2 else -1]:
            bench, step, _ = programs[name]
            batch = next(bench.batches)
            started, clock = time.process_time(), time.perf_counter()
            states[name], metrics = step(states[name], batch)
            jax.block_until_ready((states[name], metrics))
            losses[name] = float(metrics["loss"])
            if index:
                cpu[name].append(time.process_time() - started)
                wall[name].append(time.perf_counter() - clock)
    return {
        name: {
            "cpu_s": round(statistics.median(cpu[name]), 3),
            "s": round(statistics.median(wall[name]), 3),
            "temp_mb": round(step.memory_analysis().temp_size_in_bytes / 1e6, 1),
            "loss": round(losses[name], 6),
        }
        for name, (_, step, _) in programs.items()
    }


if __name__ == "__main__":
    main()
