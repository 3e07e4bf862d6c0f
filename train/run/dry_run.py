"""`--dry-run`: opens the model and the data on the devices, compiles the step, and reports the memory that XLA says it needs."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jgt import amount

from ..config import Run
from ..records.console import Screen
from ..records.summary import describe_data
from .train import open_run


def dry_run(run: Run) -> None:
    """Opens model and data on the devices, compiles the step, and prints its bytes per device."""
    # All processes open the run and compile, since compiling may need all of them; the first one prints.
    screen = Screen(enabled=jax.process_index() == 0)
    setup, data = open_run(run)
    screen.setup(setup)
    screen.say(describe_data(data.fingerprint))
    started = time.perf_counter()
    memory = setup.compile_train_step().memory_analysis()
    screen.say(f"Compiled the step in {time.perf_counter() - started:.1f} s")
    shapes, places = setup.shapes, setup.shardings
    rows = [
        ["parameters", amount(_bytes_per_device((shapes.params, shapes.frozen), (places.params, places.frozen)), "B")],
        ["optimizer state", amount(_bytes_per_device(shapes.opt_state, places.opt_state), "B")],
        *([["variables", amount(_bytes_per_device(shapes.variables, places.variables), "B")]] if shapes.variables else []),
        ["batch", amount(_bytes_per_device(setup.batch_shapes, setup.batch_shardings), "B")],
        # XLA's own figure: what it allocates beyond arguments and results.
        ["temporary (activations, gradients)", amount(memory.temp_size_in_bytes, "B")],
        ["arguments", amount(memory.argument_size_in_bytes, "B")],
        ["outputs (donated)", f"{amount(memory.output_size_in_bytes, 'B')} ({amount(memory.alias_size_in_bytes, 'B')})"],
    ]
    screen.table("Bytes per device", ["what", "bytes"], rows, numbers=1)


def _bytes_per_device(shapes: Any, shardings: Any) -> int:
    """The bytes of one device's shards of a tree of arrays. The trees of shapes and of shardings have the same structure."""
    shards = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(shards))
