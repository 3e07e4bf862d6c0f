"""The places of a program's parameters on the mesh, their form between steps, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax

import jgt
from jgt.document import InputError, nearest
from jgt.replacements.replicas import Replicas
from jgt.sharding.placement import Placement
from jgt.sharding.sharded import Sharded
from jgt.sharding.storage import Storage

from ..config import Config
from ..step.gradients import GradientSum
from ..step.objective import Objective, problem_of_parts
from .layout import MeshLayout
from .model import Where
from .program import ModelProgram, may_reshape


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A program on its mesh.

    objective: the loss of stored parameters. placement: the places of the model's own parameters. storage: how the state has them, where
    that is another form.
    """

    objective: Objective
    placement: Placement
    storage: Storage | None
    gradients: GradientSum

    @property
    def stored(self) -> Placement:
        """The placement of the parameters as the state has them."""
        return self.placement if self.storage is None else self.storage.placement


def place(program: ModelProgram, config: Config, layout: MeshLayout, where: Where, *, problems: Iterable[str]) -> Placed:
    """Places a program. problems: messages to report beside those about parameters. Raises InputError with every misfit."""
    objective, shapes = program.objective, (program.params, program.variables, program.rows)
    placement = jgt.place(
        objective.loss,
        layout.rules,
        layout.mesh,
        *shapes,
        pipeline=program.pipeline,
        state="variables",
        problems=tuple(problems),
    )
    _check_remat(config, placement, where)
    objective = _with_parts_checked(config, layout, objective, shapes, where)
    storage = objective.loss.storage(*shapes) if isinstance(objective.loss, Sharded) else None
    storage = storage if storage is None or may_reshape(config) else storage.of_same_shapes()
    stored, used = (placement, placement) if storage is None else (storage.placement, storage.in_use.placement)
    return Placed(
        objective=objective if storage is None else objective.on_stored(storage),
        placement=placement,
        storage=storage,
        gradients=_gradient_sum(config, layout, stored, used),
    )


def _check_remat(config: Config, placement: Placement, where: Where) -> None:
    """Raises InputError for names to keep that the model does not have."""
    remat, tensors = config.train.remat, placement.tensors
    unknown = [name for name in remat if name not in tensors] if isinstance(remat, tuple) else []
    if unknown:
        key = f"{where('train.remat')}: train.remat"
        raise InputError([f"{key}: the model has no tensor {name!r}. {nearest(name, tensors)}" for name in unknown])


def _with_parts_checked(config: Config, layout: MeshLayout, objective: Objective, shapes: tuple[Any, ...], where: Where) -> Objective:
    """Raises InputError for an own loss that would be another one on parts of a batch. An evaluation of such a loss gets whole batches."""
    if objective.is_token_loss or layout.pipeline is not None:
        return objective
    assert isinstance(objective.loss, Sharded)
    assert isinstance(objective.evaluated, Sharded)
    if config.train.accumulate > 1 and (problem := problem_of_parts(objective.loss, shapes)):
        remedies = (
            "Set it to 1 (train.remat saves memory, too), return (sum, weight) for an average that leaves out rows, or compute what is "
            "meant of a part inside jgt.signal.per_microbatch()"
        )
        raise InputError([f"{where('train.accumulate')}: train.accumulate: {problem}. {remedies}"])
    return replace(objective, is_of_whole_batches=bool(problem_of_parts(objective.evaluated, shapes)))


def _gradient_sum(config: Config, layout: MeshLayout, stored: Placement, used: Placement) -> GradientSum:
    """The sum of gradients. stored, used: the placements of the parameters as the state has them, and as the loss takes them."""

    def pin(gradients: Any) -> Any:
        return jax.lax.with_sharding_constraint(gradients, stored.gradients)

    whole = GradientSum(parts=1 if layout.pipeline is not None else config.train.accumulate, pin=pin)
    if not layout.replicas:
        return whole
    sync = layout.sync
    # A step with phases is one replica's, whose rows the other axes split.
    batch = tuple(axis for axis in layout.batch if not (layout.has_phases and sync is not None and axis == sync.axis))
    # As without parts: backward leaves the gradient of a parameter in the type in which the model reads it.
    widens = config.optimizer.gradients == "f32"
    dtypes = [p.dtype if p.read is None or not p.read.once or widens else p.read.dtype for p in used.parameters]
    of_replicas = replace(
        whole,
        replicas=Replicas(mesh=layout.mesh, axes=layout.replicas, batch=batch),
        shardings=used.used,
        dtypes=jax.tree.unflatten(used.tree, dtypes),
    )
    if sync is None or layout.has_phases:
        return of_replicas
    # Sums in eight bits, of parts or in a pipeline find no scan over layers that runs once, beside which they would be hidden.
    beside = whole.parts == 1 and layout.pipeline is None and layout.replicas == (sync.axis,) and sync.wire != "int8"
    return replace(
        of_replicas,
        sync=Replicas(mesh=layout.mesh, axes=(sync.axis,), batch=layout.batch),
        sums=used.params,
        wire=sync.wire,
        is_late=bool(sync.late),
        beside_layers=bool(sync.late) and beside,
    )
