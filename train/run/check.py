"""A run before it trains: the check needs no devices and shows the placement or the data, the dry run compiles the step on the devices.

Both build the `Setup` of training, so they find the same problems. The check traces the loss on a mesh without devices: in seconds, on any
machine, it shows whether rules, mesh and shapes fit. The dry run opens the data and reports the memory that XLA says the step needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgt import amount
from jgt.document import InputError, nearest, shown

from ..config import Run
from ..data.config import OwnData
from ..data.tokenizer import Tokenizer
from ..models.config import ModelConfig
from ..records.console import Screen
from ..records.summary import describe_data
from ..setup import Setup, prepare
from ..weights.described import published
from ..weights.load import open_files
from ..weights.safetensors import has_weights
from .train import open_run, opened_data
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
        open_files(published(Path(model.hf)), model, setup.saved_params[0])
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


def data_windows(run: Run, count: int, part: str | None) -> Iterator[list[dict[str, Any]]]:
    """The first windows that the run trains on, in its order, whatever its mesh: a row of values for each token.

    part: shows held-out windows instead: `count` of this part, or of each part if it is empty. Raises InputError.

    A row has the token's position in the window, its id, its text if there is a tokenizer, its weight in the loss, and the number of its
    document if documents are masked. Nothing predicts the first token of a window, which has no weight. Other samples of the user's own
    have a row for each array.
    """
    # The user's code may start JAX.
    jax.config.update("jax_platforms", "cpu")
    data, config = opened_data(run), run.config.data
    if part and part not in data.eval_parts:
        raise InputError([f"command line: --eval {shown(part)}: no data of this name is held out. {nearest(part, data.eval_parts)}"])
    batches = data.train_batches(0, 1, [0], count) if part is None else data.eval_batches(1, [0], count, part=part or None)
    tokenizer = None if isinstance(config, OwnData) or config.tokenizer_name is None else data.tokenizer
    for batch in batches:
        row = {name: values[0] for name, values in batch.items()}
        yield _token_rows(row, tokenizer, data.end) if row.keys() >= {"inputs", "targets", "weights"} else _array_rows(row)


def _token_rows(row: Mapping[str, np.ndarray], tokenizer: Tokenizer | None, end: int | None) -> list[dict[str, Any]]:
    ids = [int(row["inputs"][0]), *map(int, row["targets"])]
    columns: dict[str, list[Any]] = {"position": list(range(len(ids))), "token": ids}
    if tokenizer is not None:
        columns["text"] = [_text(tokenizer, before, token) for before, token in zip([None, *ids[:-1]], ids, strict=True)]
    columns["weight"] = [None, *map(float, row["weights"])]
    if "segments" in row:
        begins = [True, *(np.diff(row["segments"]) != 0), int(row["inputs"][-1]) == end]
        columns["document"] = np.cumsum(begins).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _text(tokenizer: Tokenizer, before: int | None, token: int) -> str:
    """The text that a token adds. A tokenizer may leave out the space in front of a first token."""
    alone = tokenizer.decode([token])
    if before is None:
        return alone
    context, both = tokenizer.decode([before]), tokenizer.decode([before, token])
    return both[len(context) :] if both.startswith(context) else alone


def _array_rows(row: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    values = {name: np.asarray(x) for name, x in row.items()}
    return [{"array": name, "shape": list(x.shape), "type": str(x.dtype), "begins": x.ravel()[:8].tolist()} for name, x in values.items()]


def print_windows(windows: Iterator[list[dict[str, Any]]]) -> None:
    """Prints windows for a person. Texts are quoted, with escapes in place of what a terminal would obey."""
    screen = Screen(enabled=True)
    for number, rows in enumerate(windows, 1):
        cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
        screen.table(f"Window {number}", list(rows[0]), cells, numbers=0)


def _cell(name: str, value: Any) -> str:
    # Of another weight than 0 and 1, three digits.
    return "" if value is None else f"{value:.3g}" if name == "weight" else shown(value, 60) if name == "text" else str(value)
