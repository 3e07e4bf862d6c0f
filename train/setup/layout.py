"""The mesh of a run, the rules on it, and over how many devices a batch is split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

import jgt
from jgt.document import InputError
from jgt.experts.exchange import can_count, served
from jgt.experts.experts import exchange_at
from jgt.pipeline.layout import axes_inside

from ..config import Run
from ..models.experts.balance import Observe
from ..models.tables import Groups
from .apart import apart_axes


def make_mesh(run: Run, num_devices: int | None, devices: Sequence[Any] | None) -> Mesh | AbstractMesh:
    """The run's mesh over all devices, or over `devices`. With `num_devices` it is abstract. Raises InputError."""
    where, order = f"{run.where('mesh')}: mesh", _axis_names(run)
    if run.is_alone and jax.process_count() > 1:
        raise InputError([f"{where}: is one device, but the run has {jax.process_count()} processes. Remove the key, or raise a size"])
    if num_devices is not None:
        return jgt.abstract_mesh(run.mesh, num_devices=1 if run.is_alone else num_devices, axis_names=order, where=where)
    if run.is_alone:
        devices = (devices or jax.devices())[:1]
    return jgt.make_mesh(run.mesh, devices=devices, axis_names=order, where=where)


def _axis_names(run: Run) -> list[str]:
    """The mesh's axes with a pipeline's right behind those of the batch, wherever the file places it."""
    names = list(run.mesh)
    if run.pipeline is None or run.pipeline.axis not in names:
        return names
    # XLA requires the manual axes of nested shard_maps in the order of the mesh, and the outer one is over the batch.
    batch = set(run.batch_dims[0]) - {run.pipeline.axis}
    first = [name for name in names if name in batch]
    return [*first, run.pipeline.axis, *(name for name in names if name not in batch and name != run.pipeline.axis)]


def num_shards(run: Run, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Over how many devices batch and sequence are split."""
    batch, sequence = (math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in run.batch_dims)
    return batch, sequence


def batch_groups(run: Run, mesh: Mesh | AbstractMesh) -> Groups:
    """The devices that split the batch, by axis. In a pipeline a device meets its own rows alone."""
    if run.pipeline is not None:
        return ()
    sync = run.config.sync
    apart = {*apart_axes(run, mesh), *(() if sync is None else (sync.axis,))}
    sizes = tuple(size for axis in run.batch_dims[0] if axis not in apart and (size := mesh.shape.get(axis, 1)) > 1)
    # XLA has no reduce-scatter for CPUs. There, a sum for each axis only costs time.
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return (math.prod(sizes),) if on_cpu and sizes else sizes


def exchange_metrics(run: Run, mesh: Mesh | AbstractMesh) -> Observe | None:
    """The metrics of the exchange of experts, from their counts: `exchange_rounds`, or `exchange_dropped` where rows may be dropped.

    None where the counts of a row do not say which device they are on: in a pipeline, and where rules split the sequence.
    """
    exchange = exchange_at(run.rules, _EXPERTS, _RANK, mesh.shape) if run.pipeline is None else None
    if exchange is None:
        return None

    def observe(counts: jax.Array, num_tokens: int, num_choices: int) -> Mapping[str, jax.Array]:
        if not can_count(exchange, *counts.shape[-2:]):
            return {}
        rounds, dropped = served(exchange, counts, num_tokens, num_choices)
        return {"exchange_dropped": jnp.mean(dropped)} if exchange.drops else {"exchange_rounds": jnp.max(rounds)}

    return observe


_EXPERTS, _RANK = "layers/moe", 3
"""The signal of the decoders' experts, and the dims of what they read."""


def devices_sharing(run: Run, mesh: Mesh | AbstractMesh) -> int:
    """The number of devices that compute a stage of the pipeline together on the same rows; 1 without a pipeline."""
    sizes = dict(mesh.shape)
    return 1 if run.pipeline is None else math.prod(sizes[axis] for axis in axes_inside(sizes, run.pipeline.axis, run.batch_dims[0]))
