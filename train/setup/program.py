"""From a run to its `Setup`: the mesh, the model, the loss under its rules, the optimizer, and the place of every array.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes. Nothing in it needs devices: on an abstract mesh, a laptop checks a
run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

import jgt
from jgt.document import InputError, nearest
from jgt.replicas import Replicas
from jgt.rules import Rules
from jgt.sharding.placement import Placement
from jgt.sharding.sharded import Sharded
from jgt.sharding.storage import Storage
from jgt.staging.pipeline import Pipeline

from ..code.names import load_object
from ..config import Run, batch_problems, replica_problems
from ..data.config import OwnData
from ..data.own import open_own
from ..models.attention import CUDNN, AttentionChoice, choose_attention
from ..models.config import ModelConfig, OwnModel
from ..models.decoder import build
from ..models.grouped import choose_grouped
from ..models.linear import compute_type
from ..models.model import Model, takes_segments
from ..models.own import own_model
from ..models.remat import Remat
from ..step.config import OwnOptimizer
from ..step.loss import loss_of_logits, make_loss, num_chunks, segments_of
from ..step.objective import Objective, ShardedLoss, own_objective, problem_of_parts, token_objective
from ..step.optimizer import MakeOptimizer, build_optimizer, own_optimizer
from ..sync.phases import Phases
from .fit import first_remat
from .layout import batch_groups, devices_sharing, exchange_metrics, make_mesh, num_shards
from .setup import Setup, rows_of
from .state import state_maker


def prepare(
    run: Run,
    *,
    num_devices: int | None = None,
    like: Any = None,
    devices: Sequence[Any] | None = None,
    element: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    remat: Remat | None = None,
) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a device such as those will be, which may be only described. devices: those of the mesh; all that JAX finds if there are none.
    element: the arrays of one row of data of the user's own; without it the data is opened. remat: instead of `train.remat`.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config = run.config
    element = element or _element(run)
    mesh, rules = make_mesh(run, num_devices, devices), run.rules
    if like is not None and isinstance(mesh, AbstractMesh):
        # What is traced inside of a shard_map names the kind of device.
        mesh = mesh.update(abstract_device=Mesh([like], ("one",)).abstract_mesh.abstract_device)
    # The loss runs on one part of the batch at a time, so the layout of its inputs is checked at the shape of a part. A pipeline gets the
    # whole batch, and runs the parts itself.
    pipeline = None if run.pipeline is None else Pipeline.of(run.pipeline.in_parts(config.train.accumulate))
    part = rows_of(element, config.train.batch // (config.train.accumulate if pipeline is None else 1))
    built = _built(run, mesh, like, part, remat or config.train.remat)
    model = built.model
    _check_segments(run, model)
    chunks = _loss_chunks(run, mesh)
    objective = _objective(run, pipeline, model, chunks, rules, mesh)
    # Under jit, what is traced here is not traced again where the state is made.
    init = jax.jit(model.init)
    # Even the key is only a shape: nothing is computed where the devices may be absent.
    params, variables = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    problems = (*batch_problems(run, mesh.shape), *replica_problems(run, mesh.shape))
    placement = jgt.place(objective.loss, rules, mesh, params, variables, part, pipeline=pipeline, state="variables", problems=problems)
    _check_remat(run, placement.tensors)
    objective = _checked_parts(run, objective, (params, variables, part))
    storage = _storage(run, objective, (params, variables, part))
    make_optimizer = _optimizer(run, model, placement, storage)
    phases = _phases(run, mesh, variables)
    make_state = state_maker(init, make_optimizer, run, storage, phases, mesh.shape.get(config.sync.axis, 1) if config.sync else 1)
    return Setup(
        run=run,
        mesh=mesh,
        model=model,
        attention=built.attention,
        grouped=built.grouped,
        remat=built.remat,
        loss_chunks=chunks,
        make_optimizer=make_optimizer,
        objective=objective if storage is None else objective.on_stored(storage),
        make_state=make_state,
        placement=placement,
        storage=storage,
        phases=phases,
        shapes=jax.eval_shape(make_state, jax.ShapeDtypeStruct((), jnp.uint32)),
        element=element,
    )


@dataclass(frozen=True, kw_only=True)
class _Built:
    """A run's model, and what was chosen for it; see `Setup`."""

    model: Model
    remat: Remat
    attention: AttentionChoice | None = None
    grouped: str = ""


def _built(run: Run, mesh: Mesh | AbstractMesh, like: Any, part: Mapping[str, jax.ShapeDtypeStruct], remat: Remat) -> _Built:
    """The model, with the kernels that the devices of the mesh have. part: the arrays of one part of a batch."""
    config = run.config.model
    if isinstance(config, OwnModel):
        return _Built(model=own_model(config, run.code, run.where, partial(_call_on_zeros, part, _own_loss(run))), remat=remat)
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else like
    attention = _attention(run, config, device, sharing=devices_sharing(run, mesh))
    remat = first_remat(remat, is_fused=attention.kernel is CUDNN)
    widens, groups = _has_wide_gradients(run), batch_groups(run, mesh)
    matmul, label = choose_grouped(config.dtype, device, fp8=config.fp8)
    observe = exchange_metrics(run, mesh) if config.experts else None
    model = build(config, remat, attention.kernel, matmul=matmul, observe=observe, groups=groups, wide_gradients=widens)
    return _Built(model=model, remat=remat, attention=attention, grouped=label if config.experts else "")


def _has_wide_gradients(run: Run) -> bool:
    """Whether the model's own derivatives leave gradients in f32 for devices to add up. A pipeline widens them anyway."""
    return run.config.optimizer.gradients == "f32" and run.pipeline is None


def _element(run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
    """The arrays of one row of a batch."""
    if isinstance(run.config.data, OwnData):
        return open_own(run.config.data, run.code, run.where, seq=run.config.model.seq, vocab=run.config.model.vocab).element
    seq = (run.config.model.seq,)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if run.config.data.documents == "mask":
        kinds["segments"] = jnp.int32
    return {name: jax.ShapeDtypeStruct(seq, kind) for name, kind in kinds.items()}


def _own_loss(run: Run) -> Callable[..., Any] | None:
    name = run.own("train.loss")
    return None if name is None else load_object(name, "train.loss", run.code, run.where("train.loss"))


def _call_on_zeros(batch: Mapping[str, jax.ShapeDtypeStruct], loss: Callable[..., Any] | None, module: Any) -> Any:
    """The loss of a batch of zeros, or the model's result without a loss of the user's own."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
    if loss is not None:
        return loss(module, zeros)
    return module(zeros["inputs"], **(segments_of(zeros) if takes_segments(module) else {}))


def _objective(run: Run, pipeline: Pipeline | None, model: Model, chunks: int, rules: Rules, mesh: Mesh | AbstractMesh) -> Objective:
    """The loss under the rules. The step, the placement and, where it makes no difference, the evaluation share one trace of it.

    pipeline: the pipeline of the step. An evaluation has the run's own, since its batches have no parts.
    """
    whole = Pipeline.of(run.pipeline)
    own = _own_loss(run)
    pads = run.config.train.uneven == "pad" and _may_reshape(run)
    tokens = loss_of_logits
    if model.has_features:
        widens, groups = _has_wide_gradients(run), batch_groups(run, mesh)
        tokens = make_loss(lambda module, x, **more: module.features(x, **more), chunks=chunks, groups=groups, wide_gradients=widens)

    def sharded(is_training: bool) -> ShardedLoss:
        if own is None:
            plain = token_objective(model, tokens, f"{run.where('model.kind')}: model.kind", is_training=is_training)
        else:
            plain = own_objective(model, own, run.where("train.loss"), is_training=is_training)
        return jgt.shard(plain, rules, mesh, pipeline=pipeline if is_training else whole, state="variables", pad=pads)

    loss = sharded(True)
    is_same = pipeline == whole and not model.is_trained_differently and (own is None or "train" not in inspect.signature(own).parameters)
    return Objective(loss=loss, evaluated=loss if is_same else sharded(False), is_token_loss=own is None, settle=model.settle)


def _checked_parts(run: Run, objective: Objective, shapes: tuple[Any, ...]) -> Objective:
    """Raises InputError for an own loss that would be another one on parts of a batch. An evaluation of such a loss gets whole batches."""
    if objective.is_token_loss or run.pipeline is not None:
        return objective
    assert isinstance(objective.loss, Sharded)
    assert isinstance(objective.evaluated, Sharded)
    if run.config.train.accumulate > 1 and (problem := problem_of_parts(objective.loss, shapes)):
        where = f"{run.where('train.accumulate')}: train.accumulate: {problem}"
        remedies = (
            "Set it to 1 (train.remat saves memory, too), return (sum, weight) for an average that leaves out rows, or compute what is "
            "meant of a part inside jgt.signal.per_microbatch()"
        )
        raise InputError([f"{where}. {remedies}"])
    return replace(objective, is_of_whole_batches=bool(problem_of_parts(objective.evaluated, shapes)))


def roles_of(model: Model, placement: Placement) -> Any:
    """The role of each parameter, as a tree like theirs."""
    return jax.tree.unflatten(placement.tree, [model.role(p.path, len(p.shape) - len(p.sliced)) for p in placement.parameters])


def _optimizer(run: Run, model: Model, placement: Placement, storage: Storage | None) -> MakeOptimizer:
    config = run.config.optimizer
    if isinstance(config, OwnOptimizer):
        return own_optimizer(config, run.code, run.where)
    stored = placement if storage is None else storage.placement
    return build_optimizer(
        config,
        roles_of(model, stored),
        dtype=compute_type(run.config.model),
        map_matrices=stored.map_matrices,
        sizes={p.path: p.shape[-2:] for p in placement.parameters},
    )


def _attention(run: Run, config: ModelConfig, device: Any, *, sharing: int) -> AttentionChoice:
    """The attention kernel. Raises InputError where the file asks for one that cannot be had."""
    choice = choose_attention(config, device, sharing=sharing)
    if config.attention not in ("auto", choice.kernel.name):
        where = run.where("model.attention")
        raise InputError(
            [
                f"{where}: model.attention: {config.attention} is not available here: {choice.why}. "
                "Use auto, which takes it where it is available, or xla"
            ]
        )
    return choice


def _check_segments(run: Run, model: Model) -> None:
    """Raises InputError if the documents are to be masked from each other, but the model would not learn where they begin."""
    data = run.config.data
    # A loss of the user's own has the batch, and calls the model as it likes.
    if isinstance(data, OwnData) or data.documents != "mask" or run.config.train.loss is not None or model.has_segments:
        return
    raise InputError(
        [
            f"{run.where('data.documents')}: data.documents: mask needs a model that takes segments [b, s], and {run.own('model.kind')} "
            "does not. Add the argument to it, or use documents: join"
        ]
    )


def _loss_chunks(run: Run, mesh: Mesh | AbstractMesh) -> int:
    """As few chunks as fit, or as many as the file says."""
    train, model, pipeline = run.config.train, run.config.model, run.pipeline
    # The rows whose logits exist at once: those of one part of the batch, in a pipeline those of one microbatch.
    rows = train.batch // train.accumulate // (1 if pipeline is None else pipeline.microbatches)
    return train.loss_chunks or num_chunks(rows, model.seq, model.vocab, mesh.size, local_seq=max(model.seq // num_shards(run, mesh)[1], 1))


def _check_remat(run: Run, tensors: Sequence[str]) -> None:
    """Raises InputError for names to keep that the model does not have."""
    remat = run.config.train.remat
    unknown = [name for name in remat if name not in tensors] if isinstance(remat, tuple) else []
    if unknown:
        where = run.where("train.remat")
        raise InputError([f"{where}: train.remat: the model has no tensor {name!r}. {nearest(name, tensors)}" for name in unknown])


def _storage(run: Run, objective: Objective, shapes: tuple[Any, ...]) -> Storage | None:
    """How the parameters are stored between steps; None: as the model has them."""
    if not isinstance(objective.loss, Sharded):
        return None
    storage = objective.loss.storage(*shapes)
    return storage if storage is None or _may_reshape(run) else storage.of_same_shapes()


def _may_reshape(run: Run) -> bool:
    """Whether parameters may be stored in other shapes than the model's."""
    # An optimizer of the user's own sees the model's shapes, which may tell it something. The host's memory has no all-to-all.
    return not isinstance(run.config.optimizer, OwnOptimizer) and run.config.optimizer.offload != "host"


def _phases(run: Run, mesh: Mesh | AbstractMesh, variables: Any) -> Phases | None:
    """The phases of a run with `sync.every` above 1. Raises InputError for a model that keeps more than parameters, with `every: 1`."""
    sync = run.config.sync
    if sync is None:
        return None
    if sync.every == 1:
        if jax.tree.leaves(variables):
            text = "the model keeps more than parameters from step to step (statistics, loads of experts, random keys)"
            remedy = "sync.every: 1 exchanges gradients only. Use a larger every, or remove sync:"
            raise InputError([f"{run.where('model.kind')}: model.kind: {text}. {remedy}"])
        return None
    return Phases(replicas=Replicas(mesh=mesh, axes=(sync.axis,), batch=run.batch_dims[0]), config=sync)
