"""A run at small sizes: the same layout, which a laptop compares with one device in seconds.

What a layout does depends on which mesh axes split a dim, and on whether they divide it, but hardly on how long it is. So each mesh axis
shrinks to 2 or 4 devices, and each dim of the model to a small multiple of all of them together; a vocabulary that is padded stays one
that has to be padded. The model computes in f32: in bf16, a wrong layout could hide behind rounding.

Nobody says which arguments of a model of the user's own are sizes. So each whole number among them is tried at smaller values, and keeps
the first one with which the program has the same layout and fewer numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jgt import use_virtual_cpu
from jgt.document import InputError

from ..config import Run, load
from ..data.config import OwnData
from ..data.own import open_own
from ..models.config import OwnModel
from ..setup import prepare
from ..setup.program import Element, element_of

_HEAD = 4
"""Numbers of a head; rotary positions need an even number."""
_MOST_EXPERTS = 16
_LARGEST_COUNT = 64
"""Whole numbers up to here may be numbers of layers or heads; larger ones are widths."""


def small_run(run: Run, num_devices: int, overrides: Sequence[str] = ()) -> Run:
    """A run at small sizes, on at most so many virtual CPU devices, which JAX has from now on. Raises InputError.

    overrides: those of the command line, which stay.
    """
    small = load(run.root, small_overrides(run, num_devices, overrides), code=run.code)
    # A caller that has started JAX has devices already. The model's own code may start it.
    with contextlib.suppress(RuntimeError):
        use_virtual_cpu(small.config.devices.virtual_cpu or num_devices)
    given = {override.partition("=")[0] for override in overrides}
    return _smaller(small, given) if isinstance(small.config.model, OwnModel) else small


def _smaller(run: Run, given: set[str]) -> Run:
    """A run with a model of the user's own at the smallest sizes that were found. given: the keys that keep their values."""
    unit, model = math.prod(run.mesh.values()), run.config.model
    assert isinstance(model, OwnModel)
    element, labels = element_of(run.config, run.code, run.where), _largest_label(run)
    layout, size = _layout(run, element)
    values = {**model.arguments, "seq": model.seq, "vocab": model.vocab}
    for key, value in sorted((key, value) for key, value in values.items() if type(value) is int and f"model.{key}" not in given):
        for new in (2, unit, 2 * unit) if value <= _LARGEST_COUNT else (4 * unit, 8 * unit, 16 * unit):
            # A number of classes must stay above all labels.
            if new >= value or new <= labels < value:
                continue
            # The model may refuse any size, with any error.
            with contextlib.suppress(Exception):
                trial = load(run.root, [f"model.{key}={new}"], code=run.code)
                new_layout, new_size = _layout(trial, None if key in ("seq", "vocab") else element)
                if new_size < size and new_layout.items() <= layout.items():
                    run, layout, size = trial, new_layout, new_size
                    break
    return run


def _layout(run: Run, element: Element | None) -> tuple[dict[str, tuple[str, bool]], int]:
    """The layout of each parameter, and how many numbers parameters and batch have. Raises any error of the model's."""
    setup = prepare(run, num_devices=math.prod(run.mesh.values()), element=element)
    places, rows = setup.storage.model.parameters, setup.program.shapes[2].values()
    # A parameter whose dims the axes do not divide is stored padded.
    layout = {place.path: (place.spec, place.path in setup.storage.forms) for place in places}
    return layout, sum(math.prod(x.shape) for x in (*places, *rows))


def _largest_label(run: Run) -> int:
    """The largest number that data of the user's own may name a class by; -1 for other data."""
    if not isinstance(run.config.data, OwnData):
        return -1
    source = open_own(run.config.data, run.code, run.where, seq=run.config.model.seq, vocab=run.config.model.vocab)
    first = source.first(run.config.train.batch).values()
    return max((int(np.max(x, initial=-1)) for x in map(np.asarray, first) if np.issubdtype(x.dtype, np.signedinteger)), default=-1)


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
    new: dict[str, object] = {
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


def _model(run: Run, unit: int, stages: int) -> dict[str, object]:
    config, train = run.config.model, run.config.train
    assert not isinstance(config, OwnModel)
    kv_heads = config.kv_heads or config.heads
    # Two chunks on a stage suit every schedule that leaves their number open.
    virtual = 1 if run.pipeline is None else run.pipeline.virtual or 2
    chunks = stages * virtual
    heads = unit * min(config.heads // kv_heads, 4)
    first = 0 if config.experts is None else config.experts.first_dense
    dense, period = min(first, 1), len(config.pattern) or 1
    new: dict[str, object] = {
        # Chunks of equal length stay so, others do not become so.
        "model.layers": dense + period * (max(chunks, 2) + bool((config.layers - first) // period % stages)),
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
    if config.latent is not None:
        sizes = {"rank": unit * _HEAD, "query_rank": config.latent.query_rank and unit * _HEAD, "rope_dim": _HEAD // 2, "value_dim": None}
        new |= {f"model.latent.{name}": size for name, size in sizes.items()}
    if config.linear is not None:
        sizes = {"heads": 2 * unit, "key_heads": unit, "key_dim": _HEAD, "value_dim": _HEAD}
        new |= {f"model.linear.{name}": size for name, size in sizes.items()}
    if config.experts is not None:
        new["model.experts.count"] = min(config.experts.count, _MOST_EXPERTS)
        new["model.experts.ffn"] = unit * _HEAD
        new["model.experts.first_dense"] = dense
    return new
