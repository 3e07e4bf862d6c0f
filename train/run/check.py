"""`jgt check`: the placement of a run's parameters, found without devices. `jgt inspect`: a published model, compared with its files.

It builds the `Setup` of training, so it finds the same problems. It traces the loss on a mesh without devices: in seconds, on any machine,
that shows whether rules, mesh and shapes fit. Most of its time is that of imports, so nothing here imports what only a run needs.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jgt import document
from jgt.document import InputError

from ..config import Run, without_effect
from ..data.config import DataConfig, OwnData
from ..data.files import Finder
from ..files.bucket import is_url
from ..models.config import ModelConfig
from ..models.decoder import build
from ..records.console import Screen
from ..setup import Setup, prepare
from ..setup.feed import eval_batch_of
from ..setup.published import open_published
from ..verify.compare import is_verified
from ..weights.described import Described
from ..weights.foreign import has_weights
from ..weights.load import open_files
from .directory.identity import check_weights
from .opened import evaluations_of, opened_data


def check_placement(run: Run) -> Setup:
    """Places the run's parameters on a mesh that is only described, and compares them with the files of `model.hf`. Reads small data.

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
    check_weights(run)
    data = opened_data(run) if is_read(run.config.data) else None
    setup, model = prepare(run, num_devices=count, element=None if data is None else data.element), run.config.model
    if data is not None:
        eval_batch_of(data, setup)
    evaluations_of(setup, (data or run.config.data).eval_parts)
    if isinstance(model, ModelConfig) and model.hf is not None and Path(model.hf).is_dir() and has_weights(Path(model.hf)):
        open_published(setup, Path(model.hf))
    return setup


def is_read(data: DataConfig | OwnData) -> bool:
    """Whether the check reads the data: samples of the user's own, to see their arrays, and files that are small enough."""
    if isinstance(data, OwnData):
        return True
    paths = [path for part in data.parts() for path in (part.path, part.eval_path) if path is not None]
    return bool(paths) and not any(map(is_url, paths)) and sum(Finder().files(path).num_bytes for path in paths) <= 8_000_000


def to_json(setup: Setup) -> dict[str, object]:
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
    data = setup.run.config.data
    for line in without_effect(setup.run, has_held_out=isinstance(data, OwnData) or bool(data.eval_parts)):
        screen.say(line)
    screen.say("Everything fits: every rule is used, and every sharded dim is divisible by its mesh axes or padded.")
    if not is_read(data):
        screen.say("The data was not read: jgt train FILE --dry-run reads all of it, and jgt check FILE --show-data shows some.")
    if not is_verified(setup.run):
        screen.say("This layout was never compared with one device on this machine: jgt verify FILE does that in seconds.")


def inserted_json(setup: Setup) -> dict[str, object]:
    """The constraints that rules put into the program of the loss, as plain values, for --json."""
    return {"inserted": list(map(asdict, _inserted(setup)))}


def print_inserted(setup: Setup) -> None:
    """Prints these constraints for a person."""
    print(_inserted(setup))


def _inserted(setup: Setup) -> Any:
    arguments: tuple[Any, ...] = setup.program.shapes
    return setup.program.loss.inserted(*arguments)


def rules_text(setup: Setup) -> str:
    """The rules of a run as a file."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in setup.mesh.shape.items())
    root = setup.run.rules_root
    tree = setup.run.rules.tree() if root is None else root.plain()
    notes = "".join(f"# {note}\n" for note in setup.run.rules.notes)
    return f"# Rules for {setup.num_parameters:,} parameters on the mesh {{{mesh}}}.\n{notes}{document.dump(tree)}"


def print_published(described: Described, config: ModelConfig, *, shows_tensors: bool) -> None:
    """Prints what a published model is, and compares the model with its files. Raises InputError."""
    jax.config.update("jax_platforms", "cpu")
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    files = open_files(described, config, shapes) if described.path.is_dir() else None
    print(f"{described.config['model_type']}: {sum(x.size for x in jax.tree.leaves(shapes)):,} parameters")
    print("\n".join(f"  {name}: {value}" for name, value in described.keys.items()))
    if files is None:
        print("" if described.unread is None else f"It can be planned, but not read: {described.unread}\n", end="")
        return
    if shows_tensors:
        print("\n".join(f"  {path}: {source.name}" for path, source in sorted(files.sources.items())))
    print(f"All {len(files.folder.tensors):,} tensors are known, and none is missing")
    if files.left_out is not None:
        print(files.left_out)
