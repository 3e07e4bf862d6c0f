"""Everything of a run up to its first step: the compiled program's bytes per device, nothing trained, nothing written."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from jgt.plan.units import size_text
from train.config import Run
from train.console import Screen
from train.loop import open_run


def dry_run(run: Run) -> None:
    """Prints the mesh, the parameters and the memory of the compiled step."""
    screen = Screen(enabled=jax.process_index() == 0)
    setup, _ = open_run(run)
    screen.setup(setup)
    started = time.perf_counter()
    memory = setup.compile_train_step().memory_analysis()
    screen.say(f"Compiled the step in {time.perf_counter() - started:.1f} s")
    state = setup.shardings
    rows = [
        ["parameters", size_text(_local(setup.shapes.params, state.params))],
        ["optimizer state", size_text(_local(setup.shapes.opt_state, state.opt_state))],
        ["batch", size_text(_local(setup.batch_shapes, setup.batch_shardings))],
        ["temporary (activations, gradients)", size_text(memory.temp_size_in_bytes)],
        ["arguments", size_text(memory.argument_size_in_bytes)],
        ["results, of which written in place", f"{size_text(memory.output_size_in_bytes)}, {size_text(memory.alias_size_in_bytes)}"],
    ]
    screen.table("Bytes per device", ["what", "bytes"], rows, numbers=1)


def _local(shapes: Any, shardings: Any) -> int:
    parts = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(parts))
