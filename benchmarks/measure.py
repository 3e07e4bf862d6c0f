"""The measurements of `step.py`. Each runs in its own process, which prints JSON.

python -m benchmarks.measure jgt|by_hand|paired|planned CONFIG [--steps N] [--target CHIP:HOSTSxGPUS] [key.sub=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.hand_written import Sizes, make_loss, make_step
from benchmarks.harness import compared, interleave
from jgt.planner.compiled import compile_function
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.instruction import COLLECTIVES
from jgt.planner.hlo.text import Module
from train.config import load
from train.data.opening import open_data
from train.models.linear import compute_type
from train.processes.connect import start_jax
from train.setup import prepare
from train.setup.feed import Feed
from train.step.optimizer import Settings
from train.step.state import State

_TRACES = 7


class Programs:
    """The training step of a run, by jgt and by hand, not yet compiled. devices: for the step; by default all that JAX finds."""

    def __init__(self, config: str, overrides: Sequence[str] = (), devices: Sequence[Any] | None = None):
        self.run = load(config, overrides)
        if devices is None:
            start_jax(None, self.run.config.devices.virtual_cpu)
        self.setup = prepare(self.run, devices=devices)
        model = self.run.config.model
        self._sizes = Sizes(
            heads=model.heads,
            kv_heads=model.num_kv_heads,
            remat=self.run.config.train.remat == "block",
            dtype=compute_type(model),
            attention=self.setup.program.attention.kernel.name,
        )

    def steps(self) -> dict[str, Any]:
        """Both steps under jax.jit, with the same signature."""
        return {"jgt": self.setup.train_step(), "by_hand": self._by_hand()}

    def _by_hand(self) -> Any:
        setup, shardings, whole = self.setup, self.setup.shardings, self.setup.storage.model.replicated()

        def stepped(state: State, batch: Any, numbers: Any) -> Any:
            optimizer = setup.make_optimizer(Settings(*numbers))
            step = make_step(setup.mesh, optimizer, self.run.config.optimizer.clip, self._sizes)  # pyright: ignore[reportArgumentType]
            params, opt_state, loss, grad_norm = step(state.params, state.opt_state, batch)
            return replace(state, step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss, "grad_norm": grad_norm}

        return jax.jit(
            stepped,
            in_shardings=(shardings, setup.batch_shardings, whole),
            out_shardings=(shardings, {"loss": whole, "grad_norm": whole}),
            donate_argnums=0,
        )

    def losses(self) -> dict[str, Callable[[], Any]]:
        """Functions that build each loss from scratch."""
        return {
            "jgt": lambda: lambda params, batch: self.setup.objective.loss(params, self.setup.shapes.variables, batch)[0],
            "by_hand": lambda: make_loss(self.setup.mesh, self._sizes),  # pyright: ignore[reportArgumentType]
        }


class Bench(Programs):
    """Both programs with real data, on the devices of this machine."""

    def __init__(self, config: str, overrides: Sequence[str] = ()):
        super().__init__(config, overrides)
        model = self.run.config.model
        data = open_data(self.run.config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
        self.batches = Feed(data, self.setup).train(0)

    def ready(self, name: str) -> tuple[Any, Any]:
        """A compiled step, `jgt` or `by_hand`, and its initial state."""
        return self.steps()[name].lower(*self.setup.step_shapes).compile(), self.setup.init()


class Stepper:
    """A compiled step with its state. Each call runs the next step and waits for its results."""

    def __init__(self, step: Any, state: Any, batches: Any, settings: Any):
        self._step, self._state, self._batches, self._settings = step, state, batches, settings
        self.loss = float("nan")

    def __call__(self) -> None:
        self._state, metrics = self._step(self._state, next(self._batches), self._settings)
        jax.block_until_ready((self._state, metrics))
        self.loss = float(metrics["loss"])


def collectives(text: str) -> Counter[tuple[str, int]]:
    """The number of collectives in the text of a compiled program, by kind and by bytes of the result on one device."""
    return Counter((i.kind, i.num_bytes) for i in Module.parse(text).instructions() if i.kind in COLLECTIVES)


def launched(config: str, overrides: Sequence[str], which: str) -> dict[str, Any]:
    """Runs one step. The caller measures the whole process."""
    bench = Bench(config, overrides)
    stepper = Stepper(*bench.ready(which), bench.batches, bench.setup.settings(1))
    stepper()
    return {"loss": stepper.loss}


def paired(config: str, overrides: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Measures both programs in one process; their steps take turns."""
    benches = {name: Bench(config, overrides) for name in ("jgt", "by_hand")}
    compiled = {name: bench.ready(name) for name, bench in benches.items()}
    steppers = {name: Stepper(*compiled[name], bench.batches, bench.setup.settings(1)) for name, bench in benches.items()}
    samples = interleave(steppers, num_steps, warmup=2)
    found = {name: collectives(step.as_text()) for name, (step, _) in compiled.items()}
    temp = {name: step.memory_analysis().temp_size_in_bytes for name, (step, _) in compiled.items()}
    return {
        "step": compared(samples),
        "trace": _traces(benches["jgt"]),
        "temp_bytes": {**temp, "ratio": temp["jgt"] / temp["by_hand"]},
        "same_collectives": found["jgt"] == found["by_hand"],
        "num_collectives": sum(found["jgt"].values()),
        "loss": {name: stepper.loss for name, stepper in steppers.items()},
    }


def planned(config: str, overrides: Sequence[str], target: str) -> dict[str, Any]:
    """Temporary and peak bytes on one device, for both programs compiled for described GPUs, without having one."""
    jax.config.update("jax_platforms", "cpu")
    where = Target.parse(target)
    with described():
        programs = Programs(config, [*overrides, f"devices.virtual_cpu={where.num_devices}"], devices_of(where))
    memory = {name: compile_function(step, programs.setup.step_shapes, where).memory for name, step in programs.steps().items()}
    kinds = {"temp_bytes": "temp_size_in_bytes", "peak_bytes": "peak_memory_in_bytes"}
    found: dict[str, Any] = {kind: {name: getattr(stats, key) for name, stats in memory.items()} for kind, key in kinds.items()}
    for figures_of in found.values():
        figures_of["ratio"] = figures_of["jgt"] / figures_of["by_hand"]
    return found


def _traces(bench: Programs) -> dict[str, Any]:
    """Seconds to trace loss and gradient with empty JAX caches, as in a new process."""

    def trace(make: Callable[[], Any]) -> None:
        jax.clear_caches()
        jax.jit(jax.value_and_grad(make())).trace(bench.setup.shapes.params, bench.setup.batch_shapes)

    samples = interleave({name: lambda make=make: trace(make) for name, make in bench.losses().items()}, _TRACES)
    return compared(samples)


def main() -> None:
    """Prints one measurement and exits at once, because the shutdown is not part of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("jgt", "by_hand", "paired", "planned"))
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--target")
    arguments = parser.parse_args()
    if arguments.name == "paired":
        found = paired(arguments.config, arguments.overrides, arguments.steps)
    elif arguments.name == "planned":
        found = planned(arguments.config, arguments.overrides, arguments.target)
    else:
        found = launched(arguments.config, arguments.overrides, arguments.name)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
