"""`jgt verify FILE`: shows that a run's layout changes no number, at sizes that a laptop compares in seconds, on virtual CPU devices.

What a layout does depends on which mesh axes split a dim, and on whether they divide it, but hardly on how long it is. So each mesh axis
shrinks to 2 or 4 devices, and each dim of the model to a small multiple of all of them together; a vocabulary that is padded stays one
that has to be padded. The model computes in f32: in bf16, a wrong layout could hide behind rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgt import Verification
from jgt.document import InputError

from ..compiled import default_folder
from ..config import Run
from ..data.config import OwnData
from ..data.own import open_own
from ..models.config import OwnModel
from ..setup import Setup, prepare
from ..step.config import OwnOptimizer
from ..step.optimizer import MakeOptimizer, Settings, build_optimizer, roles_of, settings_of_step

_HEAD = 4
"""Numbers of a head; rotary positions need an even number."""
_MOST_EXPERTS = 16


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
    sizes = {place.path: place.shape[-2:] for place in setup.storage.model.parameters}
    return build_optimizer(config, roles_of(setup.program.model, setup.storage), sizes=sizes)


def is_verified(run: Run) -> bool:
    """Whether the layout of a run was compared on this machine, or has rules that ship, which the tests compare."""
    if run.rules_root is None or _note_of(run).exists():
        return True
    return run.rules_root.is_shipped("rules")


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
        return {name: jnp.asarray(x) for name, x in source.first(run.config.train.batch).items()}
    random, vocab, shape = np.random.default_rng(0), run.config.model.vocab, shapes["inputs"].shape
    arrays = {
        "inputs": random.integers(0, vocab, shape),
        "targets": random.integers(0, vocab, shape),
        "weights": random.integers(0, 2, shape) / np.prod(shape),
        "segments": np.sort(random.integers(1, 4, shape), axis=-1),
    }
    return {name: jnp.asarray(arrays[name], x.dtype) for name, x in shapes.items()}


def small_mesh(sizes: Mapping[str, int], num_devices: int, where: str) -> dict[str, int]:
    """Sizes of 2 for all axes above 1, then of 4 for the largest, as far as the devices go. Raises InputError if 2 is too many."""
    small = {axis: 1 if size == 1 else 2 for axis, size in sizes.items()}
    if math.prod(small.values()) > num_devices:
        split = ", ".join(axis for axis, size in small.items() if size > 1)
        text = f"{split} split something, which takes {math.prod(small.values())} devices. Use --devices {math.prod(small.values())}"
        raise InputError([f"{where}: mesh: {text}"])
    # -1 stands for all devices that are left.
    for axis in sorted(sizes, key=lambda axis: -sizes[axis] if sizes[axis] > 0 else -math.inf):
        if (sizes[axis] < 0 or sizes[axis] >= 4) and math.prod(small.values()) * 2 <= num_devices:
            small[axis] *= 2
    return small


def small_overrides(run: Run, num_devices: int, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that make a run small, after its own. A model of the user's own keeps its sizes, and so does what `overrides` name."""
    mesh = small_mesh(run.mesh, num_devices, run.where("mesh")) if run.config.mesh is not None else {"data": num_devices}
    unit, pipeline, config = math.prod(mesh.values()), run.pipeline, run.config
    stages = 1 if pipeline is None else mesh.get(pipeline.axis, 1)
    microbatches = 1 if pipeline is None else 2 * stages
    accumulate = min(config.train.accumulate, 2)
    new: dict[str, Any] = {
        "devices.virtual_cpu": unit,
        "mesh": mesh,
        "train.batch": unit * microbatches * accumulate,
        "train.accumulate": accumulate,
        "model.dtype": "f32",
        "sync": None,
        "budget": None,
    }
    if pipeline is not None:
        new["pipeline.microbatches"] = microbatches
    if not isinstance(config.model, OwnModel):
        new |= _model(run, unit, stages)
    if isinstance(config.data, OwnData) and config.data.has_texts:
        # Texts have more tokens than the small vocabulary, and random ones will do.
        new["data"] = {"source": "stdlib"}
    if not isinstance(config.data, OwnData) and config.data.order != "plain":
        # One device computes attention on rows in their own order.
        new["data.order"] = "plain"
    given = {override.partition("=")[0] for override in overrides} - {"mesh", "devices.virtual_cpu"}
    # JSON is YAML.
    return [*overrides, *(f"{key}={json.dumps(value)}" for key, value in new.items() if key not in given)]


def _model(run: Run, unit: int, stages: int) -> dict[str, Any]:
    config, train = run.config.model, run.config.train
    assert not isinstance(config, OwnModel)
    kv_heads = config.kv_heads or config.heads
    # Two chunks on a stage suit every schedule that leaves their number open.
    virtual = 1 if run.pipeline is None else run.pipeline.virtual or 2
    chunks = stages * virtual
    heads = unit * min(config.heads // kv_heads, 4)
    new: dict[str, Any] = {
        # Chunks of equal length stay so, others do not become so.
        "model.layers": max(chunks, 2) + bool(run.pipeline is not None and config.layers % run.mesh.get(run.pipeline.axis, 1)),
        "model.embed": heads * _HEAD,
        "model.heads": heads,
        "model.kv_heads": unit if config.kv_heads is not None else None,
        "model.head_dim": _HEAD if config.head_dim is not None else None,
        "model.ffn": 2 * unit * _HEAD,
        # One more than a multiple is divided by no axis.
        "model.vocab": 4 * unit + (train.uneven == "pad" and config.vocab % 8 != 0),
        "model.seq": 2 * unit,
        "model.fp8": False,
        "model.attention": "xla",
    }
    if config.experts is not None:
        new["model.experts.count"] = min(config.experts.count, _MOST_EXPERTS)
        new["model.experts.ffn"] = unit * _HEAD
        new["model.experts.first_dense"] = min(config.experts.first_dense, 1)
    return new
