"""Stages chosen from measured costs, compared with all other splits: a pipeline of two stages in which one layer takes three times as long.

    python benchmarks/balance.py [--json] [--save] [--rounds 15] [--layers 6] [--heavy 0]

The program with equal stages is profiled for three steps, `pipeline.costs` chooses a split from that, and the steps of all splits are then
measured in turn. A CPU device has one thread here, as an accelerator has its own cores; the machine needs two cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

import jgt
from benchmarks.harness import interleave, make_parser, ratios, report, spread
from jgt.planner.profile.layers import PipelineTimes, StageOfLayers
from jgt.signal import context

_BATCH, _SEQ, _EMBED, _MICROBATCHES, _STEPS = 16, 64, 256, 8, 5


def main() -> None:
    """Prints the seconds of each split, and the ratio of the chosen one to the best."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heavy", type=int, default=0, help="the layer that takes three times as long")
    arguments = parser.parse_args()
    num = arguments.layers
    with tempfile.TemporaryDirectory() as folder:
        evenly = jgt.Pipeline(signal="layers", microbatches=_MICROBATCHES, layers=(num - num // 2, num // 2))
        costs = measured(step_of(evenly, num, arguments.heavy), evenly, num, Path(folder))
        chosen = jgt.Pipeline(signal="layers", microbatches=_MICROBATCHES, costs=folder).sizes(evenly.table(2), num)
    splits = [(first, num - first) for first in range(1, num)]
    programs = {
        str(sizes): step_of(jgt.Pipeline(signal="layers", microbatches=_MICROBATCHES, layers=sizes), num, arguments.heavy)
        for sizes in splits
    }
    samples = interleave({name: lambda step=step: jax.block_until_ready(step()) for name, step in programs.items()}, arguments.rounds)
    seconds = {name: spread(sample.s for sample in found) for name, found in samples.items()}
    best = min(seconds, key=lambda name: seconds[name]["median"])
    found = {
        "costs": costs,
        "step_s": seconds,
        "chosen": str(chosen),
        "best": best,
        "evenly_to_best": ratios(samples[str(evenly.layers)], samples[best])["s_ratio"],
        "chosen_to_best": ratios(samples[str(chosen)], samples[best])["s_ratio"],
    }
    report("balance", found, arguments)


def step_of(pipeline: jgt.Pipeline, num_layers: int, heavy: int) -> Callable[[], Any]:
    """A function that runs loss and gradients once, with its compiled program as `program`."""
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = {"up": (num_layers, _EMBED, 4 * _EMBED), "down": (num_layers, 4 * _EMBED, _EMBED)}
    params = {"layers": {name: jax.random.normal(k, s) * 0.05 for k, (name, s) in zip(keys, shapes.items(), strict=True)}}
    batch = {"x": jax.random.normal(keys[0], (_BATCH, _SEQ, _EMBED))}

    def block(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, None]:
        w, is_heavy = scanned
        return jax.lax.cond(is_heavy, lambda x: block(block(block(x, w), w), w), lambda x: block(x, w), x), None

    def loss(params: Any, batch: Any) -> jax.Array:
        with context("layers"):
            x, _ = jax.lax.scan(layer, batch["x"], (params["layers"], jnp.arange(num_layers) == heavy))
        return jnp.mean(x**2)

    mesh = jgt.make_mesh({"stage": 2})
    rules = jgt.make_rules({"axes": {"batch": []}, "inputs": {"x": ["batch", None, None]}, "params": {"*": []}})
    sharded = jgt.shard(loss, rules, mesh, pipeline=pipeline)
    # As in a run, each stage stores its layers. Elsewhere stages of unequal length send all weights in each step.
    storage = sharded.storage(params, batch)
    if storage is not None:
        params = jax.jit(storage.entered, out_shardings=storage.placement.params)(params)
    program = jax.jit(jax.value_and_grad(sharded if storage is None else sharded.on_stored(storage))).lower(params, batch).compile()
    placed = jax.device_put((params, batch), program.input_shardings[0])

    def step() -> Any:
        return program(*placed)

    step.program = program  # type: ignore[attr-defined]
    return step


def measured(step: Any, pipeline: jgt.Pipeline, num_layers: int, folder: Path) -> dict[str, Any]:
    """Profiles a program, writes the costs of its layers as a run does, and returns them."""
    table, sizes = pipeline.table(2), pipeline.layers
    layers = [range(sizes[0]), range(sizes[0], num_layers)]
    stages = {
        s: StageOfLayers(stage=s, layers=layers[s], most=max(sizes), forward=table.counts(s, "F"), backward=table.counts(s, "B"))
        for s in (0, 1)
    }
    times = PipelineTimes(signal="layers", microbatches=_MICROBATCHES, parts=1, by_stage=False, devices=stages)
    jax.block_until_ready(step())
    with jax.profiler.trace(str(folder)):
        for _ in range(_STEPS):
            jax.block_until_ready(step())
    (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
    costs = times.read(path, "train", step.program.as_text(), _STEPS)
    (folder / "profile").mkdir()
    (folder / "profile" / "costs-0.json").write_text(json.dumps(asdict(costs)))
    return {"forward_ms": [c.forward_ms for c in costs.layers], "backward_ms": [c.backward_ms for c in costs.layers]}


if __name__ == "__main__":
    main()
