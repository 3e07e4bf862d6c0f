"""The cost of surviving failures: how long a save blocks training, the manifest's share of a save, and the watchdog's share of a step.

    python benchmarks/survival.py [--megabytes N] [--repeats N] [--folder FOLDER] [--json] [--save]

The watchdog is timed alone and compared with a step of the quickstart, because its cost is far below the noise between two runs of a step.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.harness import interleave, make_parser, ratios, report, spread
from benchmarks.measure import Stepper
from train.checkpoint import checkpoint
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.config import load
from train.processes.config import WatchdogConfig
from train.processes.watch import Watch
from train.run.opened import open_run
from train.setup.feed import Feed
from train.step.state import State

_ARRAYS = 24
_STEPS = 20_000
_PAIRS = 20


def main() -> None:
    """Prints a line for each measurement, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1500, help="size of the saved state (default: 1500)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = saves(Path(folder), arguments.megabytes, arguments.repeats) | watch(Path(folder))
    report("survival", found, arguments)


def saves(folder: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of a save: until training continues, until the state is on disk, and for the manifest."""
    size = megabytes * 1_000_000 // 4 // _ARRAYS // 1024
    keys = jax.random.split(jax.random.key(0), _ARRAYS)
    params = {f"kernel{i}": jax.random.normal(key, (size, 1024)) for i, key in enumerate(keys)}
    state = jax.block_until_ready(State(jnp.zeros((), jnp.int32), params, {"count": jnp.zeros((), jnp.int32)}))
    manifests: list[float] = []
    plain = checkpoint.file_entries

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        entries = plain(*arguments, **options)
        manifests.append(time.perf_counter() - started)
        return entries

    checkpoint.file_entries = timed
    blocked, total = [], []
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep=1))
    for step in range(1, repeats + 2):
        os.sync()
        started = time.perf_counter()
        checkpoints.save(state, step, samples=0)
        blocked.append(time.perf_counter() - started)
        checkpoints.wait()
        total.append(time.perf_counter() - started)
    checkpoints.close()
    checkpoint.file_entries = plain
    blocking, whole, manifest = (spread(times[1:]) for times in (blocked, total, manifests))
    return {
        "state_mb": megabytes,
        "save_s": whole,
        "blocking_s": blocking,
        "blocking_share": blocking["median"] / whole["median"],
        "manifest_s": manifest,
        "manifest_share": manifest["median"] / whole["median"],
    }


def watch(folder: Path) -> dict[str, Any]:
    """Seconds that the watchdog adds to a step on the training thread, and seconds of a quickstart step."""
    with Watch(WatchdogConfig(), folder, None) as guard:
        started = time.perf_counter()
        for step in range(_STEPS):
            guard.may_begin(step)
        each = (time.perf_counter() - started) / _STEPS

    def watched() -> None:
        with Watch(WatchdogConfig(), folder, None):
            spin()

    samples = interleave({"watched": watched, "alone": spin}, _PAIRS)
    share = ratios(samples["watched"], samples["alone"])["s_ratio"]
    step = quickstart_step(folder)
    return {"watch_s": each, "step_s": step, "watch_share": each / step["median"], "watched_to_alone": share}


def spin() -> None:
    """A fixed amount of Python work, which the watchdog's thread slows down a little."""
    for _ in range(10):
        sum(range(3_000_000))


def quickstart_step(folder: Path) -> dict[str, float]:
    """Seconds of a quickstart step on one device."""
    run = load("configs/quickstart.yaml", ["rules=null", "mesh=null", f"run.dir={folder / 'run'}", "devices.virtual_cpu=null"])
    setup, data = open_run(run)
    batches = Feed(data, setup).train(0)
    samples = interleave({"step": Stepper(setup.compile_train_step(), setup.init(), batches, setup.settings(1))}, rounds=5)
    return spread(sample.s for sample in samples["step"])


if __name__ == "__main__":
    main()
