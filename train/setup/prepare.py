"""Prepares a run: `program_of` traces its model and loss, `Sharded.storage_for` places every array, and `FirstState` makes its state.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes. Nothing in it needs devices: on an abstract mesh, a laptop checks a
run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jgt import Replicas, Rules, Storage
from jgt.document import InputError, Node, nearest

from ..config import Run, batch_problems, replica_problems
from ..models.config import OwnModel
from ..models.linear import compute_type
from ..settings.code.files import Code
from ..settings.training import TrainConfig
from ..step.config import OptimizerConfig, OwnOptimizer
from ..step.gradients import GradientSum
from ..step.objective import Objective, problem_of_parts
from ..step.optimizer import MakeOptimizer, build_optimizer, own_optimizer, roles_of
from ..step.state import Tree
from ..step.step import StepFeatures
from ..step.sync.phases import Phases
from ..step.trained import Trained
from .layout import MeshLayout, mesh_layout
from .losses import Where, may_reshape
from .program import Element, ModelProgram, element_of, program_of
from .remat import Remat
from .setup import Setup
from .state import FirstState


def prepare(
    run: Run,
    *,
    num_devices: int | None = None,
    like: Any = None,
    devices: Sequence[Any] | None = None,
    element: Element | None = None,
    remat: Remat | None = None,
    partial_rules: bool = False,
) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a description of one of these devices. devices: the mesh's, otherwise all that JAX finds. element: the arrays of one row of data
    of the user's own; without it the data is opened. remat: replaces `train.remat`. partial_rules: whether
    rules may match nothing, because they are those of a larger program.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config, code, where = run.config, run.code, run.where
    layout = mesh_layout(run, num_devices=num_devices, like=like, devices=devices)
    element = element or element_of(config, code, where)
    program = program_of(config, layout, code, where, element=element, remat=remat or config.train.remat, partial_rules=partial_rules)
    sizes = layout.mesh.shape
    problems = (*batch_problems(run, sizes), *replica_problems(run, sizes))
    try:
        storage = program.loss.storage_for(program.shapes, keeps_shapes=not may_reshape(config.optimizer), problems=problems)
    except InputError as error:
        raise InputError(_in_short(run, problems, error.problems)) from None
    objective = _objective(program, storage, config.train, layout, where)
    gradients = _gradient_sum(config.train.accumulate, layout, storage, program.trained, is_wide=config.optimizer.gradients == "f32")
    make_optimizer = _optimizer(config.optimizer, program, storage, compute_type(config.model), code, where)
    phases = _phases(layout, program, where)
    # Late gradients that are not finite are part of the state before the update. Inside a phase one replica does not stop the others.
    stops = config.train.on_nonfinite == "stop" and phases is None and not gradients.is_late
    features = StepFeatures(spikes=config.train.skip_spikes, ema=config.train.ema, stops=stops)
    first = FirstState(
        init=program.init,
        storage=storage,
        trained=program.trained,
        gradients=gradients,
        make_optimizer=make_optimizer,
        features=features,
        phases=phases,
    )
    return Setup(
        run=_with_chosen_rules(run, storage.model.rules),
        mesh=layout.mesh,
        program=program,
        objective=objective,
        storage=storage,
        trained=program.trained,
        gradients=gradients,
        offload=config.optimizer.offload == "host",
        make_optimizer=make_optimizer,
        features=features,
        phases=phases,
        make_state=first.make_state,
        shapes=jax.eval_shape(first.make_state, jax.ShapeDtypeStruct((), jnp.uint32)),
    )


def _with_chosen_rules(run: Run, rules: Rules) -> Run:
    """The run with the rules that its program has, where they were chosen because those of its file do not fit."""
    if not rules.is_chosen:
        return run
    assert run.rules_root is not None
    return replace(run, rules=rules, rules_root=Node.of(rules.tree(), run.rules_root.where))


def _in_short(run: Run, of_batch: Sequence[str], problems: Sequence[str]) -> Iterator[str]:
    """Problems without what follows from the batch, and without each single rule of a shipped file that is for other models."""
    sizes = {problem.partition(" has size ")[2] for problem in of_batch}
    named = None if run.config.rules is None else run.config.rules.value
    is_other = isinstance(run.config.model, OwnModel) and isinstance(named, str) and named.startswith("jgt:")
    unused = [one for one in problems if is_other and (" matches. " in one or " that the spec fits" in one)]
    if unused:
        why = f"{len(unused)} of its rules name parts of jgt's own models that {run.config.model.kind} does not have"
        yield f"{run.where('rules')}: rules: {named}: {why}. Use jgt:any, which fits every model, or write others (docs/rules.md)"
    yield from (one for one in problems if one not in unused and (one in of_batch or one.partition(" has size ")[2] not in sizes - {""}))


def _objective(program: ModelProgram, storage: Storage, train: TrainConfig, layout: MeshLayout, where: Where) -> Objective:
    """The loss of stored parameters. Raises InputError."""
    _check_remat(train.remat, storage.model.tensors, where)
    shapes: tuple[Any, ...] = program.shapes
    if not program.loss.planned(*shapes)[1].is_reusable:
        why = "a call uses an array of an earlier one, which was only traced. Keep no arrays in globals, lists or attributes"
        raise InputError([f"{where('model.kind' if program.is_token_loss else 'train.loss')}: the model or its loss: {why}"])
    rows_meet = False
    if layout.pipeline is None and not program.is_token_loss:
        _check_parts(program, train.accumulate, where)
        rows_meet = bool(problem_of_parts(program.evaluated, program.shapes))
    return Objective(
        loss=program.loss.on_used(storage),
        evaluated=program.evaluated.on_used(storage),
        is_token_loss=program.is_token_loss,
        used=storage.used,
        settle=program.model.settle,
        is_of_whole_batches=rows_meet,
    )


def _check_remat(remat: Remat, tensors: Sequence[str], where: Where) -> None:
    """Raises InputError for names to keep that the model does not have."""
    key = f"{where('train.remat')}: train.remat"
    if unknown := [name for name in remat if name not in tensors] if isinstance(remat, tuple) else []:
        raise InputError([f"{key}: the model has no tensor {name!r}. {nearest(name, tensors)}" for name in unknown])


def _check_parts(program: ModelProgram, parts: int, where: Where) -> None:
    """Raises InputError for an own loss that would be another one on parts of a batch."""
    if parts > 1 and (problem := problem_of_parts(program.loss, program.shapes)):
        remedies = (
            "Set it to 1 (train.remat saves memory, too), return (sum, weight) for an average that leaves out rows, or compute what is "
            "meant of a part inside jgt.signal.per_microbatch()"
        )
        raise InputError([f"{where('train.accumulate')}: train.accumulate: {problem}. {remedies}"])


def _gradient_sum(accumulate: int, layout: MeshLayout, storage: Storage, trained: Trained, *, is_wide: bool) -> GradientSum:
    """The sum of gradients. They have the places of the parameters as the loss takes them, and in the end those that the state has."""
    stored, used = storage.placement, storage.in_use.placement

    def pin(gradients: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(gradients, trained.of(stored.gradients))

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
        shardings=trained.of(used.used),
        dtypes=trained.of(jax.tree.unflatten(used.tree, dtypes)),
    )
    if sync is None or layout.has_phases:
        return of_replicas
    # Sums in eight bits, of parts or in a pipeline find no scan over layers that runs once, beside which they would be hidden.
    beside = whole.parts == 1 and layout.pipeline is None and layout.replicas == (sync.axis,) and sync.wire != "int8"
    return replace(
        of_replicas,
        sync=Replicas(mesh=layout.mesh, axes=(sync.axis,), batch=layout.batch),
        sums=trained.of(used.params),
        wire=sync.wire,
        is_late=bool(sync.late),
        in_layer_scan=bool(sync.late) and beside,
    )


def _optimizer(
    config: OptimizerConfig | OwnOptimizer, program: ModelProgram, storage: Storage, dtype: jax.typing.DTypeLike, code: Code, where: Where
) -> MakeOptimizer:
    """The optimizer of a run. dtype: of Muon's matmuls. Raises InputError."""
    if isinstance(config, OwnOptimizer):
        return own_optimizer(config, code, where)
    return build_optimizer(
        config,
        roles_of(program.model, storage),
        dtype=dtype,
        map_matrices=storage.placement.map_matrices,
        sizes={p.path: p.shape[-2:] for p in storage.model.parameters},
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
