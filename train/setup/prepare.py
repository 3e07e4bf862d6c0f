"""Prepares a run: `program_of` traces its model and loss, `place` finds the place of every array, and `make_state` makes its state.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes. Nothing in it needs devices: on an abstract mesh, a laptop checks a
run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jgt
from jgt import Placement
from jgt.document import InputError, nearest
from jgt.replacements.replicas import Replicas
from jgt.sharding.sharded import Sharded
from jgt.sharding.storage import Storage

from ..code.files import Code
from ..config import Run, batch_problems, replica_problems
from ..models.linear import compute_type
from ..sections import TrainConfig
from ..step.config import OptimizerConfig, OwnOptimizer
from ..step.gradients import GradientSum
from ..step.objective import Objective, problem_of_parts
from ..step.optimizer import MakeOptimizer, Settings, build_optimizer, own_optimizer, roles_of
from ..step.state import State
from ..step.step import StepFeatures
from ..sync.phases import Phases
from .layout import MeshLayout, mesh_layout
from .program import Element, ModelProgram, Where, element_of, may_reshape, program_of
from .remat import Remat
from .setup import Setup


def prepare(
    run: Run,
    *,
    num_devices: int | None = None,
    like: Any = None,
    devices: Sequence[Any] | None = None,
    element: Element | None = None,
    remat: Remat | None = None,
) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a description of one of these devices. devices: the mesh's, otherwise all that JAX finds. element: the arrays of one row of data
    of the user's own; without it the data is opened. remat: replaces `train.remat`.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config, code, where = run.config, run.code, run.where
    layout = mesh_layout(run, num_devices=num_devices, like=like, devices=devices)
    element = element or element_of(config.data, config.model, code, where)
    program = program_of(config, layout, code, where, element=element, remat=remat or config.train.remat)
    sizes = layout.mesh.shape
    problems = (*batch_problems(run, sizes), *replica_problems(run, sizes))
    placed = place(program, config.train, config.optimizer, layout, where, problems=problems)
    make_optimizer = _optimizer(config.optimizer, program, placed, compute_type(config.model), code, where)
    features = StepFeatures(spikes=config.train.skip_spikes, ema=config.train.ema)
    phases = _phases(layout, program, where)

    def make_state(seed: jax.Array) -> State:
        params, variables = program.init(jax.random.key(seed))
        params = placed.storage.entered(params)
        # The state does not depend on the settings.
        opt_state = make_optimizer(Settings(lr=0.0, weight_decay=0.0, clip=0.0)).init(params)
        losses, average = features.first_losses(), features.first_average(params)
        waiting = placed.gradients.first_waiting(jax.eval_shape(placed.storage.used, params))
        state = State(jnp.zeros((), jnp.int32), params, opt_state, variables, losses=losses, average=average, waiting=waiting)
        return state if phases is None else phases.begin(state)

    return Setup(
        run=run,
        mesh=layout.mesh,
        program=program,
        objective=placed.objective,
        placement=placed.placement,
        storage=placed.storage,
        gradients=placed.gradients,
        offload=config.optimizer.offload == "host",
        make_optimizer=make_optimizer,
        features=features,
        phases=phases,
        make_state=make_state,
        shapes=jax.eval_shape(make_state, jax.ShapeDtypeStruct((), jnp.uint32)),
    )


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A program on its mesh.

    objective: the loss of stored parameters. placement: the places of the model's own parameters. storage: how the state has them.
    """

    objective: Objective
    placement: Placement
    storage: Storage
    gradients: GradientSum


def place(
    program: ModelProgram,
    train: TrainConfig,
    optimizer: OptimizerConfig | OwnOptimizer,
    layout: MeshLayout,
    where: Where,
    *,
    problems: Sequence[str],
) -> Placed:
    """Places a program. problems: messages to report beside those about parameters. Raises InputError with every misfit."""
    objective, shapes = program.objective, program.shapes
    placement = jgt.place(
        objective.loss, layout.rules, layout.mesh, *shapes, pipeline=program.pipeline, state="variables", problems=problems
    )
    _check_remat(train.remat, placement, where)
    if layout.pipeline is None and not objective.is_token_loss:
        objective = _with_parts_checked(objective, shapes, train.accumulate, where)
    assert isinstance(objective.loss, Sharded)
    storage = objective.loss.storage(*shapes)
    if storage is not None and not may_reshape(optimizer):
        storage = storage.of_same_shapes()
    storage = storage or Storage(model=placement)
    return Placed(
        objective=objective.on_stored(storage),
        placement=placement,
        storage=storage,
        gradients=_gradient_sum(train.accumulate, layout, storage, is_wide=optimizer.gradients == "f32"),
    )


def _check_remat(remat: Remat, placement: Placement, where: Where) -> None:
    """Raises InputError for names to keep that the model does not have."""
    key, tensors = f"{where('train.remat')}: train.remat", placement.tensors
    if unknown := [name for name in remat if name not in tensors] if isinstance(remat, tuple) else []:
        raise InputError([f"{key}: the model has no tensor {name!r}. {nearest(name, tensors)}" for name in unknown])


def _with_parts_checked(objective: Objective, shapes: tuple[Any, ...], parts: int, where: Where) -> Objective:
    """Raises InputError for an own loss that would be another one on parts of a batch. An evaluation of such a loss gets whole batches."""
    assert isinstance(objective.loss, Sharded)
    assert isinstance(objective.evaluated, Sharded)
    if parts > 1 and (problem := problem_of_parts(objective.loss, shapes)):
        remedies = (
            "Set it to 1 (train.remat saves memory, too), return (sum, weight) for an average that leaves out rows, or compute what is "
            "meant of a part inside jgt.signal.per_microbatch()"
        )
        raise InputError([f"{where('train.accumulate')}: train.accumulate: {problem}. {remedies}"])
    return replace(objective, is_of_whole_batches=bool(problem_of_parts(objective.evaluated, shapes)))


def _gradient_sum(accumulate: int, layout: MeshLayout, storage: Storage, *, is_wide: bool) -> GradientSum:
    """The sum of gradients. They have the places of the parameters as the loss takes them, and in the end those that the state has."""
    stored, used = storage.placement, storage.in_use.placement

    def pin(gradients: Any) -> Any:
        return jax.lax.with_sharding_constraint(gradients, stored.gradients)

    whole = GradientSum(parts=1 if layout.pipeline is not None else accumulate, pin=pin)
    if not layout.replicas:
        return whole
    sync = layout.sync
    # A step with phases is one replica's, whose rows the other axes split.
    batch = tuple(axis for axis in layout.batch if not (layout.has_phases and sync is not None and axis == sync.axis))
    # As without parts: backward leaves the gradient of a parameter in the type in which the model reads it.
    dtypes = [p.dtype if p.read is None or not p.read.once or is_wide else p.read.dtype for p in used.parameters]
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


def _optimizer(
    config: OptimizerConfig | OwnOptimizer, program: ModelProgram, placed: Placed, dtype: Any, code: Code, where: Where
) -> MakeOptimizer:
    """The optimizer of a run. dtype: of Muon's matmuls. Raises InputError."""
    if isinstance(config, OwnOptimizer):
        return own_optimizer(config, code, where)
    return build_optimizer(
        config,
        roles_of(program.model, placed.storage.placement),
        dtype=dtype,
        map_matrices=placed.storage.placement.map_matrices,
        sizes={p.path: p.shape[-2:] for p in placed.placement.parameters},
    )


def _phases(layout: MeshLayout, program: ModelProgram, where: Where) -> Phases | None:
    """The phases of a run with `sync.every` above 1. Raises InputError for a model that keeps more than parameters, with `every: 1`."""
    if layout.sync is None:
        return None
    if layout.has_phases:
        return Phases(replicas=Replicas(mesh=layout.mesh, axes=(layout.sync.axis,), batch=layout.batch), config=layout.sync)
    _, variables, _ = program.shapes
    if jax.tree.leaves(variables):
        text = "the model keeps more than parameters from step to step (statistics, loads of experts, random keys)"
        remedy = "sync.every: 1 exchanges gradients only. Use a larger every, or remove sync:"
        raise InputError([f"{where('model.kind')}: model.kind: {text}. {remedy}"])
    return None
