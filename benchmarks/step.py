"""A training step of jgt against the same model in plain JAX with every constraint written by hand.

    python benchmarks/step.py [--json] [--config benchmarks/step.yaml] [--steps 10]

Reports, each in a fresh process: CPU-seconds and seconds from launch to the end of the first step (jgt and hand-written);
then, interleaved in one process: CPU-seconds and seconds a step, median, with the ratio; tracing time with the ratio;
and whether the two compiled steps hold the same collectives (kind, bytes, count).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Runs the children and prints their figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "benchmarks/step.yaml"))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    result = {name: run_child(name, arguments) for name in CHILDREN}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, figures in result.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:34} {value}")


def run_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement in its own process, which knows when it was launched."""
    command = [sys.executable, __file__, "--child", name, "--config", arguments.config, "--steps", str(arguments.steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LAUNCHED": str(time.time())}, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


class Bench:
    """A run's parts, ready to step on real data."""

    def __init__(self, config: str, overrides: Sequence[str] = ()):
        from train.config import load
        from train.processes import start

        run = load(config, overrides)
        start(None, run.config.devices.virtual_cpu)
        from train.data.batches import open_data
        from train.feed import Feed
        from train.setup import prepare

        self.setup = prepare(run)
        model, train = run.config.model, run.config.train
        data = open_data(run.config.data, seq=model.seq, vocab=model.vocab, seed=0, cache_dir=Path("runs/benchmark/data"))
        self.batches = Feed(data, self.setup.batch_shardings, train.batch, model.seq).train(0)
        self.model = model
        self.remat = train.remat == "full"

    def jgt(self) -> tuple[Callable[..., Any], Any]:
        """The trainer's own compiled step and its state."""
        return self.setup.compile_train_step(), self.setup.init()

    def by_hand(self) -> tuple[Callable[..., Any], Any]:
        """The hand-written step with the same signature."""
        import jax

        from benchmarks.hand_written import make_step
        from train.step import State

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


def launch(arguments: argparse.Namespace, which: str) -> dict[str, Any]:
    """From launch to the end of the first step."""
    bench = Bench(arguments.config)
    import jax

    step, state = getattr(bench, which)()
    state, metrics = step(state, next(bench.batches))
    jax.block_until_ready(metrics)
    cpu, seconds = time.process_time(), time.time() - float(os.environ["LAUNCHED"])
    return {"cpu_s_to_first_step": round(cpu, 2), "s_to_first_step": round(seconds, 2), "loss": float(metrics["loss"])}


def paired(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both programs in one process, a step of one and a step of the other in turn."""
    import jax

    from benchmarks.collectives import collectives

    bench = Bench(arguments.config)
    programs = {"jgt": bench.jgt(), "by_hand": bench.by_hand()}
    steps = {name: step for name, (step, _) in programs.items()}
    states = {name: state for name, (_, state) in programs.items()}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    wall: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for index, batch in zip(range(arguments.steps + 2), bench.batches, strict=False):
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
    import jax

    import jgt
    from benchmarks.hand_written import make_loss
    from train.loss import make_loss as make_plain_loss

    setup = bench.setup
    make = {
        "jgt": lambda: jgt.shard(make_plain_loss(setup.model.apply), setup.placement.rules, setup.mesh),
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


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "jgt": lambda arguments: launch(arguments, "jgt"),
    "by_hand": lambda arguments: launch(arguments, "by_hand"),
    "paired": paired,
}

if __name__ == "__main__":
    main()
