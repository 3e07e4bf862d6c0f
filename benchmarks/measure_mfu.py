"""The measurements of `mfu.py`. Each runs in its own process, which prints JSON.

python -m benchmarks.measure_mfu ceiling
python -m benchmarks.measure_mfu memory [--target h200:1x1] key.sub=value ...
python -m benchmarks.measure_mfu step key.sub=value ...
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import ROOT, interleave, spread
from jgt.planner.compiled import compile_function
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from train.config import Run, load
from train.data.opening import open_data
from train.records.progress import peak_flops
from train.setup import Setup, prepare
from train.setup.feed import Feed
from train.setup.xla import configure_xla

_SIZE = 8192
_MATMULS = 50
_STEPS = 4
"""Steps in one sample. They are dispatched without waiting in between, as in a training run."""
_ROUNDS = 5


def main() -> None:
    """Prints one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("ceiling", "memory", "step"))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--target")
    arguments = parser.parse_args()
    if arguments.name == "ceiling":
        found = ceiling()
    elif arguments.target is not None:
        jax.config.update("jax_platforms", "cpu")
        found = planned(read(arguments.overrides), Target.parse(arguments.target))
    else:
        run = read(arguments.overrides)
        configure_xla(run.config)
        found = memory(prepare(run)) if arguments.name == "memory" else step(prepare(run))
    print(json.dumps(found), flush=True)
    os._exit(0)


def read(overrides: Sequence[str]) -> Run:
    """The run of mfu.yaml with these overrides."""
    return load(str(ROOT / "benchmarks/mfu.yaml"), overrides)


def ceiling() -> dict[str, Any]:
    """FLOP/s of a large bf16 matmul, [8192, 8192] times [8192, 8192], and the peak of the chip."""
    a = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), jnp.bfloat16)
    many = jax.jit(lambda x, a: jax.lax.fori_loop(0, _MATMULS, lambda _, x: (x @ a) * 0.01, x))
    samples = interleave({"matmul": lambda: jax.block_until_ready(many(a, a))}, rounds=10, warmup=3)
    flops = 2 * _SIZE**3 * _MATMULS
    return {
        "device": jax.devices()[0].device_kind,
        "peak": peak_flops(jax.devices()[0].device_kind),
        "matmul": spread(flops / s.s for s in samples["matmul"]),
    }


def memory(setup: Setup) -> dict[str, Any]:
    """Peak bytes of the step compiled for this machine's GPU, and the limit of JAX's allocator. Nothing is allocated."""
    stats = setup.compile_train_step().memory_analysis()
    device: Any = jax.devices()[0]
    return {
        "peak_bytes": stats.peak_memory_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "limit_bytes": device.memory_stats()["bytes_limit"],
    }


def planned(run: Run, target: Target) -> dict[str, Any]:
    """The same for a described GPU, without having one."""
    with described():
        setup = prepare(run, devices=devices_of(target))
    stats = compile_function(setup.train_step(), setup.step_shapes, target).memory
    return {
        "parameters": setup.num_parameters,
        "peak_bytes": stats.peak_memory_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "limit_bytes": int(target.chip.hbm_gb * 1e9),
    }


def step(setup: Setup) -> dict[str, Any]:
    """Seconds per step, tokens/s, FLOP/s and peak memory on this machine's GPU."""
    config, device = setup.run.config, jax.devices()[0]
    model, batch = config.model, config.train.batch
    data = open_data(config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
    batches = Feed(data, setup).train(0)
    compiled, state = setup.compile_train_step(), setup.init()

    def some() -> float:
        nonlocal state
        metrics: Any = None
        for _ in range(_STEPS):
            state, metrics = compiled(state, next(batches), setup.settings(1))
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    samples = interleave({"steps": some}, rounds=_ROUNDS)["steps"]
    tokens = batch * model.seq * _STEPS
    flops = tokens * model.flops_per_token(setup.num_parameters)
    stats: Any = device.memory_stats()
    return {
        "device": device.device_kind,
        "parameters": setup.num_parameters,
        "batch": batch,
        "step_s": spread(sample.s / _STEPS for sample in samples),
        "tokens_per_s": spread(tokens / sample.s for sample in samples),
        "flops_per_s": spread(flops / sample.s for sample in samples),
        "peak_gb": stats["peak_bytes_in_use"] / 1e9,
        "loss": samples[-1].found,
    }


if __name__ == "__main__":
    main()
