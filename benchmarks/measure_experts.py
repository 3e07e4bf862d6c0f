"""The measurement of balance in `experts.py`, in a process of its own, which prints JSON.

python -m benchmarks.measure_experts bias|none|batch|sequence STEPS SEED
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import ROOT
from train.config import load
from train.data.opening import open_data
from train.processes.connect import start_jax
from train.setup import prepare
from train.setup.feed import Feed

OVERLOAD = 1.0
"""The router's weight of a token's first activation, for two experts."""


def overloaded(method: str, num_steps: int, seed: int) -> dict[str, float]:
    """Trains in this process, from a router that prefers two experts. load_max: the mean over the last ten steps."""
    run = load(str(ROOT / "configs/moe.yaml"), [f"model.experts.balance={method}", f"run.seed={seed}"])
    start_jax(None, run.config.devices.virtual_cpu)
    setup = prepare(run)
    state, train_step = setup.init(), setup.compile_train_step()

    def biased(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # The first activation is positive for every token, and the router of each layer reads it.
        if name.startswith("embed/"):
            return jax.device_put(x.at[:, 0].set(2 * jnp.abs(x).max()), x.sharding)
        return jax.device_put(x.at[:, 0, :2].set(OVERLOAD), x.sharding) if name.endswith("moe/router/kernel") else x

    state = replace(state, params=jax.tree_util.tree_map_with_path(biased, state.params))
    model = run.config.model
    feed = Feed(open_data(run.config.data, seq=model.seq, vocab=model.vocab, seed=seed, cache_dir=Path("runs/benchmark/data")), setup)
    loads, batches = list[float](), feed.train(0)
    for number in range(num_steps):
        state, metrics = train_step(state, next(batches), setup.settings(number + 1))
        loads.append(float(metrics["load_max"]))
    evaluate = setup.compile_eval_step(run.config.train.batch)
    batches = feed.evaluation(run.config.train.eval_batches)
    sums = [evaluate(state.params, state.variables, batch)["loss"] for batch in batches]
    loss = sum(float(total) for total, _ in sums) / sum(float(weight) for _, weight in sums)
    course = {f"load_max at step {number}": loads[number - 1] for number in (1, *range(50, num_steps, 50))}
    return {**course, "load_max": statistics.mean(loads[-10:]), "loss": loss}


if __name__ == "__main__":
    print(json.dumps(overloaded(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
