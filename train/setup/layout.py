"""The mesh of a run, and what its axes do: which of them split a batch, and along which of them gradients are added up last.

Rules say which axes split a batch and which split parameters. Along an axis of the batch that splits no parameter, each device has what
it needs for the gradients of its rows, so the devices are replicas that can add up alone (`train.step.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

import jgt
from jgt import PipelineConfig, Rules
from jgt.document import InputError

from ..config import Run
from ..models.config import OwnModel
from ..step.loss import Groups
from ..step.sync.config import SyncConfig


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """A run's mesh and rules, and the roles of its axes.

    device: a device of the mesh, or a description of one; None if nothing is known of them. batch, sequence: the axes that split these dims
    of a batch. replicas: the axes of the batch along which devices add up the gradients of all parts of a batch before they send any.
    """

    mesh: Mesh | AbstractMesh
    device: Any
    rules: Rules
    pipeline: PipelineConfig | None
    sync: SyncConfig | None
    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    replicas: tuple[str, ...]

    @property
    def has_phases(self) -> bool:
        """Whether replicas train for themselves, and exchange parameters after some steps."""
        return self.sync is not None and self.sync.every > 1

    @property
    def groups(self) -> Groups:
        """The devices that split the batch, by axis. In a pipeline a device meets its own rows alone."""
        if self.pipeline is not None:
            return ()
        apart = {*self.replicas, *(() if self.sync is None else (self.sync.axis,))}
        sizes = tuple(size for axis in self.batch if axis not in apart and (size := self.mesh.shape.get(axis, 1)) > 1)
        # XLA has no reduce-scatter for CPUs. There, a sum for each axis only costs time.
        on_cpu = isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"
        return (math.prod(sizes),) if on_cpu and sizes else sizes

    @property
    def sequence_shards(self) -> int:
        """The number of devices that split the sequence."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in self.sequence)

    @property
    def devices_of_stage(self) -> int:
        """The number of devices that compute a stage of the pipeline together on the same tokens; 1 without a pipeline."""
        sizes = dict(self.mesh.shape)
        inside = () if self.pipeline is None else self.pipeline.axes_inside(sizes, (*self.batch, *self.sequence))
        return math.prod(sizes[axis] for axis in inside)


def mesh_layout(run: Run, *, num_devices: int | None = None, like: Any = None, devices: Sequence[Any] | None = None) -> MeshLayout:
    """The run's layout over all devices, or over `devices`. Raises InputError.

    num_devices: makes the mesh abstract, with this many devices. like: a description of one of these.
    """
    mesh = _mesh(run, num_devices, devices)
    if like is not None and isinstance(mesh, AbstractMesh):
        # A trace inside of a shard_map names the kind of device.
        mesh = mesh.update(abstract_device=Mesh([like], ("one",)).abstract_mesh.abstract_device)
    batch, sequence = run.batch_dims
    return MeshLayout(
        mesh=mesh,
        device=mesh.devices.flat[0] if isinstance(mesh, Mesh) else like,
        rules=run.rules,
        pipeline=run.pipeline,
        sync=run.config.sync,
        batch=batch,
        sequence=sequence,
        replicas=_replica_axes(run, {axis for axis in batch if mesh.shape.get(axis, 1) > 1}),
    )


def _mesh(run: Run, num_devices: int | None, devices: Sequence[Any] | None) -> Mesh | AbstractMesh:
    where, order = f"{run.where('mesh')}: mesh", _axis_names(run)
    if run.is_alone and jax.process_count() > 1:
        raise InputError([f"{where}: is one device, but the run has {jax.process_count()} processes. Remove the key, or raise a size"])
    if num_devices is not None:
        return jgt.abstract_mesh(run.mesh, num_devices=1 if run.is_alone else num_devices, axis_names=order, where=where)
    if run.is_alone:
        devices = (devices or jax.devices())[:1]
    try:
        return jgt.make_mesh(run.mesh, devices=devices, axis_names=order, where=where)
    except InputError as error:
        raise InputError([f"{problem}{_without_gpus(run)}" for problem in error.problems]) from None


def _without_gpus(run: Run) -> str:
    """A remedy for a mesh that does not fit because JAX has found no GPU; empty where there are some, or virtual devices."""
    if jax.devices()[0].platform != "cpu" or run.config.devices.virtual_cpu is not None:
        return ""
    trial = f"devices.virtual_cpu={abs(math.prod(run.mesh.values()))}"
    return f". JAX has found no GPU: install it with pip install 'jgt[gpu]', or set {trial} for a trial on CPUs"


def _axis_names(run: Run) -> list[str]:
    """The mesh's axes, with a pipeline's axis right behind the batch's, wherever the file places it."""
    if run.pipeline is None:
        return list(run.mesh)
    batch, stages = run.batch_dims[0], run.pipeline.axis
    # XLA requires the manual axes of nested shard_maps in the order of the mesh, and the outer one is over the batch.
    return sorted(run.mesh, key=lambda name: 1 if name == stages else 0 if name in batch else 2)


def _replica_axes(run: Run, split: set[str]) -> tuple[str, ...]:
    """The axes of `MeshLayout.replicas`. split: the axes of the batch with more than one device.

    No rule splits a parameter over them, and the loss is a sum over rows: the trainer's own, of a model whose rows do not meet, as they do
    in the balance of experts and in the scales of eight bits. The axis of `sync` is one of them unless there are phases, because a step is
    then one replica's. A pipeline adds up its parts itself, over all axes except `sync.axis`.
    """
    model, train, sync = run.config.model, run.config.train, run.config.sync
    if train.loss is not None or isinstance(model, OwnModel) or model.experts is not None or model.fp8:
        return ()
    free = [axis for axis in run.batch_dims[0] if axis in split and axis not in run.rules.axes_of_parameters()]
    if sync is not None and sync.every > 1:
        free = [axis for axis in free if axis != sync.axis]
    if train.accumulate == 1 or run.pipeline is not None:
        free = [axis for axis in free if sync is not None and axis == sync.axis]
    return tuple(free)
