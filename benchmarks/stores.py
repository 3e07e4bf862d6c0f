"""What a checkpoint in a bucket costs beside one in a folder: how long a save holds training up, and the step that follows it.

    python benchmarks/stores.py [--megabytes N] [--repeats N] [--json] [--save]

The bucket is a folder too (file://), so the store itself takes next to nothing. Saves of the two take turns in one process with 8 devices.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import make_parser, report, spread, turns
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.step.state import State

_ARRAYS = 24


def main() -> None:
    """Prints a line for each measurement, or one JSON object."""
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the saved state (default: 1000)")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = saves({"folder": Path(folder, "run"), "bucket": f"file://{folder}/bucket"}, arguments.megabytes, arguments.repeats)
    report("stores", found, arguments)


def saves(places: dict[str, Path | str], megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds until a save lets training continue, of the next step, and until the save is finished. The step takes the state's memory."""
    sharding = NamedSharding(Mesh(jax.devices(), "fsdp"), PartitionSpec("fsdp"))
    size = megabytes * 1_000_000 // 4 // _ARRAYS // 1024 // len(jax.devices()) * len(jax.devices())
    params = {f"kernel{i}": jax.device_put(jnp.full((size, 1024), float(i)), sharding) for i in range(_ARRAYS)}
    state = State(jnp.zeros((), jnp.int32), params, {})
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    checkpoints = {name: Checkpoints(place, CheckpointConfig(keep=1)) for name, place in places.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in places}
    for number, (name, counts) in enumerate(turns(list(places), repeats, 1), 1):
        state = jax.block_until_ready(step(state))
        os.sync()
        marks = [time.perf_counter()]
        checkpoints[name].save(state, number, samples=0)
        marks.append(time.perf_counter())
        state = jax.block_until_ready(step(state))
        marks.append(time.perf_counter())
        checkpoints[name].wait()
        marks.append(time.perf_counter())
        if counts:
            times[name].append([marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[0]])
    for one in checkpoints.values():
        one.close()
    kinds = ("held_up_s", "next_step_s", "finished_s")
    figures = {
        name: {kind: spread(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)} for name, rows in times.items()
    }
    pairs = zip(times["bucket"], times["folder"], strict=True)
    return {"state_mb": megabytes, **figures, "held_up_ratio": spread(bucket[0] / folder[0] for bucket, folder in pairs)}


if __name__ == "__main__":
    main()
