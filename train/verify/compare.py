"""`jgt verify FILE`: shows that a run's layout changes no number, at sizes that a laptop compares in seconds, on virtual CPU devices.

A layout that was compared is remembered in the user's cache folder, by its program, rules, mesh and compiler. The note contains them, under
a checksum: a damaged one, or that of another program, counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jgt
from jgt import Verification

from ..config import Run
from ..data.config import OwnData
from ..data.own import open_own
from ..files.sealed import DamagedError, default_folder, read_sealed, write_sealed
from ..models.config import OwnModel
from ..setup import Setup, prepare
from ..step.config import OwnOptimizer
from ..step.optimizer import MakeOptimizer, Settings, build_optimizer, roles_of, settings_of_step


def compare_layouts(small: Run, run: Run) -> Verification:
    """Compares a small run with one device. If nothing differs, `is_verified(run)` holds from now on. Raises InputError."""
    setup = prepare(small, devices=jax.devices()[: math.prod(small.mesh.values())])
    params, variables = setup.program.model.init(jax.random.key(0))
    batch = sample_batch(setup)
    settings = Settings(*(jnp.float32(x) for x in settings_of_step(small.config.optimizer, small.steps, 1)))
    comparison = Verification.of(
        setup.program.loss,
        params,
        variables,
        batch,
        optimizer=setup.make_optimizer(settings),
        plain_optimizer=_without_mesh(setup)(settings),
    )
    # Objects that were given from Python have no checksum.
    if comparison.is_right and not run.code.objects:
        program = _program_of(run)
        note = _note_of(program)
        # Without a home or room, the next start compares again.
        with contextlib.suppress(OSError, RuntimeError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(note, program)
    return comparison


def _without_mesh(setup: Setup) -> MakeOptimizer:
    """The optimizer of a run on one device: Muon's brings each matrix to one of the devices of a mesh."""
    config = setup.run.config.optimizer
    if isinstance(config, OwnOptimizer):
        return setup.make_optimizer
    sizes = {place.path: place.shape[-2:] for place in setup.storage.model.parameters}
    return build_optimizer(config, roles_of(setup.program.model, setup.storage), sizes=sizes)


def is_known(run: Run) -> bool:
    """Whether the layout of a run needs no comparison: one device has all, or the tests compare its rules with the trainer's own models."""
    own = isinstance(run.config.model, OwnModel) or run.own("train.loss") is not None
    shipped = run.rules_root is None or run.rules_root.is_shipped("rules")
    return run.is_alone or math.prod(run.mesh.values()) == 1 or (shipped and not own)


def is_verified(run: Run) -> bool:
    """Whether the layout of a run is known to be right, or was compared on this machine."""
    if is_known(run):
        return True
    program = _program_of(run)
    with contextlib.suppress(OSError, RuntimeError, DamagedError):
        return read_sealed(_note_of(program)) == program
    return False


def _program_of(run: Run) -> bytes:
    """Everything that decides whether the layout of a run is right: its program, rules and mesh, and the compiler."""
    config = run.config
    parts = {
        "model": config.model,
        "loss": config.train.loss,
        "step": (config.train.remat, config.train.accumulate > 1, config.train.loss_chunks is not None, config.train.uneven),
        "optimizer": (config.optimizer.name, config.optimizer.gradients, config.optimizer.offload),
        "data": config.data.source,
        "code": run.code.checksum,
        "rules": None if run.rules_root is None else run.rules_root.plain(),
        "mesh": [(axis, size) for axis, size in run.mesh.items() if size != 1],
        "pipeline": run.pipeline and (run.pipeline.schedule, run.pipeline.signal, run.pipeline.axis),
        "compiler": (jax.__version__, jgt.__version__, os.environ.get("JGT_AVOID_FAULTS")),
    }
    return repr(parts).encode()


def _note_of(program: bytes) -> Path:
    return default_folder().parent.parent / "verified" / hashlib.sha256(program).hexdigest()


def sample_batch(setup: Setup) -> Mapping[str, jax.Array]:
    """A batch: random tokens, weights and documents, or the first samples of the user's own data."""
    run, shapes = setup.run, setup.batch_shapes
    if isinstance(run.config.data, OwnData):
        source = open_own(run.config.data, run.code, run.where, seq=run.config.model.seq, vocab=run.config.model.vocab)
        return {name: jnp.asarray(x) for name, x in source.first(run.config.train.batch).items()}
    random, vocab, shape = np.random.default_rng(0), run.config.model.vocab, shapes["inputs"].shape
    arrays = {
        "inputs": random.integers(0, vocab, shape),
        "targets": random.integers(0, vocab, shape),
        "weights": random.integers(0, 2, shape) / np.prod(shape),
        "segments": np.sort(random.integers(1, 4, shape), axis=-1),
    }
    return {name: jnp.asarray(arrays[name], x.dtype) for name, x in shapes.items()}
