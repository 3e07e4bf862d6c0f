"""The comparison of a small run with one device, and the note that a layout was compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgt.api.verify import Verification, verify_sharded
from jgt.document import shipped_folder
from jgt.sharding.sharded import Sharded

from ..compiled import default_folder
from ..config import Run
from ..data.config import OwnData
from ..data.own import open_own
from ..setup import Setup, prepare
from ..step.config import OwnOptimizer
from ..step.optimizer import MakeOptimizer, Settings, build_optimizer, roles_of, settings_of_step


def compare_layouts(small: Run, run: Run) -> Verification:
    """Compares a small run with one device. If nothing differs, `is_verified(run)` holds from now on. Raises InputError."""
    setup = prepare(small, devices=jax.devices()[: math.prod(small.mesh.values())])
    loss = setup.objective.of_model
    assert isinstance(loss, Sharded)
    params, variables = setup.model.init(jax.random.key(0))
    batch = sample_batch(setup)
    settings = Settings(*(jnp.float32(x) for x in settings_of_step(small.config.optimizer, small.steps, 1)))
    comparison = verify_sharded(
        loss,
        params,
        variables,
        batch,
        optimizer=setup.make_optimizer(settings),
        plain_optimizer=_without_mesh(setup)(settings),
    )
    if comparison.is_right:
        note = _note_of(run)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return comparison


def _without_mesh(setup: Setup) -> MakeOptimizer:
    """The optimizer of a run on one device: Muon's brings each matrix to one of the devices of a mesh."""
    config = setup.run.config.optimizer
    if isinstance(config, OwnOptimizer):
        return setup.make_optimizer
    sizes = {place.path: place.shape[-2:] for place in setup.placement.parameters}
    return build_optimizer(config, roles_of(setup.model, setup.placement), sizes=sizes)


def is_verified(run: Run) -> bool:
    """Whether the layout of a run was compared on this machine, or has rules that ship, which the tests compare."""
    if run.rules_root is None or _note_of(run).exists():
        return True
    return Path(run.rules_root.where.rpartition(":")[0]).resolve().is_relative_to(shipped_folder().resolve() / "rules")


def _note_of(run: Run) -> Path:
    axes = [axis for axis, size in run.mesh.items() if size != 1]
    pipeline = None if run.pipeline is None else (run.pipeline.schedule, run.pipeline.signal)
    rules = None if run.rules_root is None else run.rules_root.plain()
    key = repr((axes, rules, pipeline, run.config.model.kind))
    return default_folder().parent.parent / "verified" / hashlib.sha256(key.encode()).hexdigest()


def sample_batch(setup: Setup) -> Mapping[str, jax.Array]:
    """A batch: random tokens, weights and documents, or the first samples of the user's own data."""
    run, shapes = setup.run, setup.batch_shapes
    if isinstance(run.config.data, OwnData):
        source = open_own(run.config.data, run.code, run.where, seq=run.config.model.seq, vocab=run.config.model.vocab)
        samples = [source.train[n % len(source.train)] for n in range(run.config.train.batch)]
        return {name: jnp.asarray(x) for name, x in source.stack(samples).items()}
    random, vocab, shape = np.random.default_rng(0), run.config.model.vocab, shapes["inputs"].shape
    arrays = {
        "inputs": random.integers(0, vocab, shape),
        "targets": random.integers(0, vocab, shape),
        "weights": random.integers(0, 2, shape) / np.prod(shape),
        "segments": np.sort(random.integers(1, 4, shape), axis=-1),
    }
    return {name: jnp.asarray(arrays[name], x.dtype) for name, x in shapes.items()}
