"""What `step.py` measures, one measurement a process: `python -m benchmarks.measure NAME CONFIG STEPS` prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jgt
from benchmarks.hand_written import make_loss, make_step
from jgt.plan.hlo import KINDS, Module
from train.config import load
from train.data.batches import open_data
from train.feed import Feed
from train.loss import make_loss as make_plain_loss
from train.processes import start
from train.setup import prepare
from train.step import State


class Bench:
    """A run's parts, ready to step on real data."""

    def __init__(self, config: str, overrides: Sequence[str] = ()):
        run = load(config, overrides)
        start(None, run.config.devices.virtual_cpu)
        self.setup = prepare(run)
        model, train = run.config.model, run.config.train
        data = open_data(run.config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
        self.batches = Feed(data, self.setup.batch_shardings, train.batch, model.seq).train(0)
        self.model = model
        self.remat = train.remat == "block"

    def jgt(self) -> tuple[Callable[..., Any], Any]:
        """The trainer's own compiled step and its state."""
        return self.setup.compile_train_step(), self.setup.init()

    def by_hand(self) -> tuple[Callable[..., Any], Any]:
        """The hand-written step with the same signature."""
        setup, shardings, whole = self.setup, self.setup.shardings, self.setup.placement.replicated()
        step = make_step(setup.mesh, setup.optimizer, heads=self.model.heads, kv_heads=self.model.num_kv_heads, remat=self.remat)  # pyright: ignore[reportArgumentType]

        def stepped(state: State, batch: Any) -> Any:
            params, opt_state, loss, grad_norm = step(state.params, state.opt_state, batch)
            return State(state.step + 1, params, opt_state), {"loss": loss, "grad_norm": grad_norm}

        jitted = jax.jit(
            stepped,
            in_shardings=(shardings, setup.batch_shardings),
            out_shardings=(shardings, {"loss": whole, "grad_norm": whole}),
            donate_argnums=0,
        )
        return jitted.lower(setup.shapes, setup.batch_shapes).compile(), setup.init()


def collectives(text: str) -> Counter[tuple[str, int]]:
    """(kind, bytes of the result on one device) → how many stand in the text of a compiled program."""
    return Counter((i.kind, i.num_bytes) for i in Module.of(text).instructions() if i.kind in KINDS)


def launch(config: str, which: str) -> dict[str, Any]:
    """From launch to the end of the first step."""
    bench = Bench(config)
    step, state = getattr(bench, which)()
    state, metrics = step(state, next(bench.batches))
    jax.block_until_ready(metrics)
    cpu, seconds = time.process_time(), time.time() - float(os.environ["LAUNCHED"])
    return {"cpu_s_to_first_step": round(cpu, 2), "s_to_first_step": round(seconds, 2), "loss": float(metrics["loss"])}


def paired(config: str, num_steps: int) -> dict[str, Any]:
    """Both programs in one process, a step of one and a step of the other in turn."""
    bench = Bench(config)
    programs = {"jgt": bench.jgt(), "by_hand": bench.by_hand()}
    steps = {name: step for name, (step, _) in programs.items()}
    states = {name: state for name, (_, state) in programs.items()}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    wall: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index, batch in zip(range(num_steps + 2), bench.batches, strict=False):
        # The order turns round each time, so that neither program always finds the caches warm.
        for name in list(steps)[:: 1 if index % 2 else -1]:
            started, clock = time.process_time(), time.perf_counter()
            states[name], metrics = steps[name](states[name], batch)
            jax.block_until_ready((states[name], metrics))
            losses[name] = float(metrics["loss"])
            if index >= 2:
                cpu[name].append(time.process_time() - started)
                wall[name].append(time.perf_counter() - clock)
    traces = _traces(bench)
    found = {name: collectives(step.as_text()) for name, step in steps.items()}
    return {
        "cpu_s_a_step": {name: round(statistics.median(values), 3) for name, values in cpu.items()},
        "s_a_step": {name: round(statistics.median(values), 3) for name, values in wall.items()},
        "cpu_ratio": round(statistics.median(a / b for a, b in zip(cpu["jgt"], cpu["by_hand"], strict=True)), 4),
        "s_ratio": round(statistics.median(a / b for a, b in zip(wall["jgt"], wall["by_hand"], strict=True)), 4),
        "trace_s": {name: round(statistics.median(values), 4) for name, values in traces.items()},
        "trace_ratio": round(statistics.median(traces["jgt"]) / statistics.median(traces["by_hand"]), 3),
        "same_collectives": found["jgt"] == found["by_hand"],
        "num_collectives": sum(found["jgt"].values()),
        "loss": losses,
        "jax": jax.__version__,
    }


def _traces(bench: Bench) -> dict[str, list[float]]:
    """Seconds to trace loss and gradient as a new process does, JAX's caches empty; interleaved, the first round warms up."""
    setup = bench.setup
    make = {
        "jgt": lambda: jgt.shard(make_plain_loss(setup.model.features), setup.placement.rules, setup.mesh),
        "by_hand": lambda: make_loss(setup.mesh, heads=bench.model.heads, kv_heads=bench.model.num_kv_heads, remat=bench.remat),  # pyright: ignore[reportArgumentType]
    }
    seconds: dict[str, list[float]] = {name: [] for name in make}
    for index in range(8):
        for name, make_one in make.items():
            jax.clear_caches()
            loss = make_one()
            started = time.perf_counter()
            jax.jit(jax.value_and_grad(loss)).trace(setup.shapes.params, setup.batch_shapes)
            if index:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Prints one measurement."""
    name, config, num_steps = sys.argv[1:]
    print(json.dumps(paired(config, int(num_steps)) if name == "paired" else launch(config, name)))


if __name__ == "__main__":
    main()
