"""The measurements of `scaling.py`: the trainer's step on 1, 2, 4 and 8 virtual CPU devices, in turn in one process. Prints JSON.

    python -m benchmarks.measure_scaling STEPS

All devices share the machine's cores, so wall seconds do not show scaling. Tokens per CPU-second show how much work a step is: they stay
the same if splitting a step costs nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import interleave, spread
from benchmarks.measure import Stepper
from train.config import load
from train.data.opening import open_data
from train.processes.connect import start_jax
from train.setup import prepare
from train.setup.feed import Feed

SIZES = (1, 2, 4, 8)
STRONG, WEAK = 16, 2
"""Sequences in a batch: for strong scaling on all devices together, for weak scaling on each device."""
CONFIG = "benchmarks/step.yaml"
SEQ = 128
SMALL = (
    "model.layers=2",
    "model.vocab=1024",
    f"model.seq={SEQ}",
    "train.remat=none",
    "rules=../configs/rules/fsdp.yaml",
    "mesh={fsdp: -1}",
)


def main() -> None:
    """Prints a row for each kind of scaling and number of devices."""
    num_steps = int(sys.argv[1])
    start_jax(None, max(SIZES))
    batches = {"strong": [STRONG] * len(SIZES), "weak": [WEAK * size for size in SIZES]}
    points = {(size, batch) for kind in batches for size, batch in zip(SIZES, batches[kind], strict=True)}
    found = interleave({f"{size}, {batch}": stepper(size, batch) for size, batch in sorted(points)}, num_steps, warmup=2)
    rows: list[dict[str, Any]] = []
    for (kind, given), index in itertools.product(batches.items(), range(len(SIZES))):
        size, batch = SIZES[index], given[index]
        samples, one = found[f"{size}, {batch}"], found[f"{SIZES[0]}, {given[0]}"]
        tokens, alone = batch * SEQ, given[0] * SEQ
        rows.append(
            {
                "scaling": kind,
                "devices": size,
                "batch": batch,
                "s": spread(sample.s for sample in samples),
                "cpu_s": spread(sample.cpu_s for sample in samples),
                "tokens_per_cpu_s": spread(tokens / sample.cpu_s for sample in samples),
                "to_one_device": spread(tokens / a.cpu_s / (alone / b.cpu_s) for a, b in zip(samples, one, strict=True)),
            }
        )
    print(json.dumps(rows))


def stepper(size: int, batch: int) -> Stepper:
    """The trainer's step on the first `size` devices."""
    run = load(CONFIG, [*SMALL, f"train.batch={batch}", f"devices.virtual_cpu={max(SIZES)}"])
    setup = prepare(run, devices=jax.devices()[:size])
    model = run.config.model
    data = open_data(run.config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
    return Stepper(setup.compile_train_step(), setup.init(), Feed(data, setup).train(0), setup.settings(1))


if __name__ == "__main__":
    main()
