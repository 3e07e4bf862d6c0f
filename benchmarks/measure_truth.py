"""Compiles the step of one run of runs.yaml, in a process of its own, and stores what a fit needs: the text, and where its devices are.

python benchmarks/measure_truth.py ROW FILE

FILE gets the row's JSON, and FILE with the suffix `.gz` the compiled text.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import ROOT
from benchmarks.published import RUNS
from jgt.planner.compiled import compile_function
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from jgt.planner.plan import read_plan
from train.config import load
from train.setup import prepare
from train.setup.xla import planned_flags


def main() -> None:
    """Compiles the row on the command line."""
    name, path = sys.argv[1], Path(sys.argv[2])
    row = RUNS[name]
    jax.config.update("jax_platforms", "cpu")
    target = Target.parse(row.target)
    run = load(str(ROOT / "configs/llama-70b.yaml"), [*row.overrides, f"devices.virtual_cpu={target.num_devices}"])
    with described():
        setup = prepare(run, num_devices=target.num_devices, like=devices_of(target)[0])
    flags, _ = planned_flags(run.config, has_gpu=True)
    compiled = compile_function(setup.train_step(), setup.step_shapes, target, flags)
    plan = read_plan(compiled, run.rules)
    found: dict[str, Any] = {
        "mesh": dict(compiled.mesh.shape),
        "hosts": [device.process_index for device in compiled.mesh.devices.flat],
        "peak_gb": plan.memory.peak_bytes / 1e9,
        "fits": plan.memory.fits,
        "model_flops": plan.model_flops_per_device,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path.with_suffix(".gz"), "wt", compresslevel=4) as file:
        file.write(compiled.text)
    # Last: a row without its JSON is compiled again.
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
