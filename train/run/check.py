"""A run's placement, without training: the check needs no devices, the dry run compiles the step on them.

Both build the `Setup` of training, so they find the same problems. The check traces the loss on a mesh without devices: in seconds, on any
machine, it shows whether rules, mesh and shapes fit. The dry run opens the data and reports the memory that XLA says the step needs.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgt import amount
from jgt.document import InputError

from ..config import Run
from ..models.config import ModelConfig
from ..records.console import Screen
from ..records.summary import describe_data
from ..setup import Setup, prepare
from ..weights.described import published
from ..weights.load import open_files
from ..weights.safetensors import has_weights
from .train import open_run
from .verify import is_verified


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
        ["parameters", amount(_bytes_per_device(shapes.params, places.params), "B")],
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


def check_placement(run: Run) -> Setup:
    """Places the run's parameters on a mesh that is only described, and compares them with the files of `model.hf`.

    Raises InputError with every problem.

    The number of devices is `devices.virtual_cpu`, or else the product of the mesh's sizes; without a mesh it is 1.
    """
    # Tracing needs some backend. The CPU's leaves the accelerators of this machine to whatever runs on them.
    jax.config.update("jax_platforms", "cpu")
    count = run.config.devices.virtual_cpu or (1 if run.config.mesh is None else None)
    if count is None:
        # The size that is left over cannot be known without a number of devices.
        if -1 in run.mesh.values():
            raise InputError([f"{run.where('mesh')}: mesh: one size is -1. Add --devices N to say for how many devices to check"])
        count = math.prod(run.mesh.values())
    setup, model = prepare(run, num_devices=count), run.config.model
    if isinstance(model, ModelConfig) and model.hf is not None and Path(model.hf).is_dir() and has_weights(Path(model.hf)):
        open_files(published(Path(model.hf)), model, setup.saved_of_one[0].params)
    return setup


def to_json(setup: Setup) -> dict[str, Any]:
    """The placement as plain values, for --json."""
    return {
        "ok": True,
        "mesh": dict(setup.mesh.shape),
        "parameters": [
            {
                "name": p.path,
                "signals": list(p.signals),
                "shape": list(p.shape),
                "spec": p.spec,
                "bytes_per_device": stored.bytes_per_device(setup.mesh),
            }
            for p, stored in zip(setup.storage.model.parameters, setup.storage.placement.parameters, strict=True)
        ],
    }


def print_check(setup: Setup) -> None:
    """Prints the placement for a person."""
    screen = Screen(enabled=True)
    screen.setup(setup)
    screen.say("Everything fits: every rule is used, and every sharded dim is divisible by its mesh axes or padded.")
    if not is_verified(setup.run):
        screen.say("This layout was never compared with one device on this machine: jgt verify FILE does that in seconds.")
