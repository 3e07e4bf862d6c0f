"""Which devices of a run are replicas whose gradients stay apart until all parts of a batch are done, and how these are then added up.

Rules say which axes split a batch and which split parameters. Along an axis of the batch that splits no parameter, each device has what
it needs for the gradients of its own rows, so it can add them up alone (`train.step.parts`). `sync: {every: 1}` says how they cross its
axis then.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.replicas import Replicas
from jgt.sharding.placement import Placement

from ..config import Run
from ..models.config import OwnModel
from ..step.parts import Apart, Wired


def apart_axes(run: Run, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes of the batch along which devices add up the gradients of all parts of a batch before they send any (`Apart`).

    These include the axis of `sync` if gradients cross it in every step; with phases each replica has axes of its own, without it.
    No rule may split a parameter over them, and the loss has to be a sum over rows: the trainer's own, of a model whose rows do not meet.
    They meet in the balance of experts and in the scales of eight bits. A pipeline adds up its parts itself, over all axes but the one
    of `sync`.
    """
    config = run.config
    model, is_sum = config.model, config.train.loss is None
    if not is_sum or isinstance(model, OwnModel) or model.experts is not None or model.fp8:
        return ()
    sync, split = config.sync, run.rules.axes_of_parameters()
    free = [axis for axis in run.batch_dims[0] if mesh.shape.get(axis, 1) > 1 and axis not in split]
    if sync is not None and sync.every > 1:
        free = [axis for axis in free if axis != sync.axis]
    if config.train.accumulate == 1 or run.pipeline is not None:
        free = [axis for axis in free if sync is not None and axis == sync.axis]
    return tuple(free)


def apart_of(run: Run, mesh: Mesh | AbstractMesh, placement: Placement) -> Apart | None:
    """How gradients stay apart while the parts of a batch are added up; None: they do not. placement: of the parameters in use."""
    axes, sync = apart_axes(run, mesh), run.config.sync
    if not axes:
        return None
    # With phases the step is one replica's, whose rows the other axes split.
    own = sync.axis if sync is not None and sync.every > 1 else None
    # As without parts: backward leaves the gradient of a parameter in the type in which the model reads it.
    widens = run.config.optimizer.gradients == "f32"
    dtypes = [p.dtype if p.read is None or not p.read.once or widens else p.read.dtype for p in placement.parameters]
    return Apart(
        replicas=Replicas(mesh=mesh, axes=axes, batch=tuple(axis for axis in run.batch_dims[0] if axis != own)),
        shardings=placement.used,
        dtypes=jax.tree.unflatten(placement.tree, dtypes),
        wired=_wired(run, mesh, placement),
        rides=run.pipeline is None,
    )


def residual_shardings(run: Run, mesh: Mesh | AbstractMesh, placement: Placement) -> Any:
    """Of what each replica's gradient has lost on its way, or what waits of it, [R, ...]; placement: of such gradients, without R."""
    wired = _wired(run, mesh, placement)
    assert wired is not None, "only sync: {every: 1} keeps gradients"
    return jax.tree.map(wired.replicas.lifted, wired.shardings)


def gradient_replicas(run: Run, mesh: Mesh | AbstractMesh) -> Replicas:
    """The replicas whose gradients cross the axis of `sync`."""
    sync = run.config.sync
    assert sync is not None
    return Replicas(mesh=mesh, axes=(sync.axis,), batch=run.batch_dims[0])


def _wired(run: Run, mesh: Mesh | AbstractMesh, placement: Placement) -> Wired | None:
    """How gradients cross the axis of `sync`; None without it, and with phases."""
    sync = run.config.sync
    if sync is None or sync.every > 1:
        return None
    return Wired(
        replicas=gradient_replicas(run, mesh), shardings=placement.params, wire=sync.wire, feedback=sync.feedback, is_late=bool(sync.late)
    )
