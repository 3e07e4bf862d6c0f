"""What `scaling.py` measures: the trainer's step on 1, 2, 4 and 8 virtual CPU devices, in turn in one process, which prints JSON.

    python -m benchmarks.measure_scaling STEPS

All devices share the machine's cores: wall seconds say nothing of scaling here. What can be shown is the work: tokens in a CPU-second,
which stay the same where splitting a step costs nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import interleave, spread
from benchmarks.measure import Stepper
from train.config import load
from train.data.batches import open_data
from train.feed import Feed
from train.processes import start
from train.setup import prepare

SIZES = (1, 2, 4, 8)
STRONG, WEAK = 16, 2
"""Sequences of a batch: on all devices together, and on each."""
CONFIG = "benchmarks/step.yaml"
SMALL = ("model.layers=2", "model.vocab=1024", "model.seq=128", "rules=../configs/rules/fsdp.yaml", "mesh={fsdp: -1}")


def main() -> None:
    """Prints a row for each kind and number of devices."""
    num_steps = int(sys.argv[1])
    start(None, max(SIZES))
    points = {f"{kind}, {size}": (kind, size, STRONG if kind == "strong" else WEAK * size) for kind in ("strong", "weak") for size in SIZES}
    samples = interleave({name: stepper(size, batch) for name, (_, size, batch) in points.items()}, num_steps, warmup=2)
    rows: list[dict[str, Any]] = []
    for name, (kind, size, batch) in points.items():
        one = samples[f"{kind}, {SIZES[0]}"]
        tokens = batch * 128
        alone = tokens if kind == "strong" else WEAK * SIZES[0] * 128
        rows.append(
            {
                "scaling": kind,
                "devices": size,
                "batch": batch,
                "s": spread(sample.s for sample in samples[name]),
                "cpu_s": spread(sample.cpu_s for sample in samples[name]),
                "tokens_per_cpu_s": spread(tokens / sample.cpu_s for sample in samples[name]),
                "to_one_device": spread(tokens / a.cpu_s / (alone / b.cpu_s) for a, b in zip(samples[name], one, strict=True)),
            }
        )
    print(json.dumps(rows))


def stepper(size: int, batch: int) -> Stepper:
    """The step on the first `size` devices."""
    run = load(CONFIG, [*SMALL, f"train.batch={batch}", f"devices.virtual_cpu={max(SIZES)}"])
    setup = prepare(run, devices=jax.devices()[:size])
    model = run.config.model
    data = open_data(run.config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
    return Stepper(setup.compile_train_step(), setup.init(), Feed(data, setup.batch_shardings, batch, model.seq).train(0))


if __name__ == "__main__":
    main()
