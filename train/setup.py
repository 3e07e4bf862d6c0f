"""Everything of a run that exists before its first step: devices, model, placement, compiled functions.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes: mesh, model, loss under its rules, optimizer, and the place of
every array. Nothing in it needs devices: on an abstract mesh, a laptop checks a run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jgt
from jgt.document import InputError, nearest
from jgt.pipeline.layout import axes_inside
from jgt.rules import Rules
from jgt.sharding.placement import Placement

from .code.names import load_object
from .config import Run, batch_problems
from .data.config import OwnData
from .data.own import open_own
from .models.attention import AttentionChoice, choose_attention
from .models.config import ModelConfig, OwnModel
from .models.decoder import build
from .models.linear import compute_type
from .models.model import Model
from .models.own import own_model
from .sections import SpikesConfig
from .step.config import OwnOptimizer
from .step.loss import loss_of_logits, make_loss, num_chunks
from .step.objective import Objective, ShardedLoss, own_objective, token_objective
from .step.optimizer import MakeOptimizer, build_optimizer, own_optimizer
from .step.schedule import Settings, settings_of_step
from .step.step import State, make_eval_step, make_train_step, no_losses
from .step.update import update_all, update_in_turn

_COMPILED_ONCE = {"xla_backend_optimization_level": 1}
"""For a program that runs once, LLVM's expensive passes take longer than they save."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run's parts, their shapes and where they go; built by `prepare`, nothing allocated.

    make_state: from a seed, uint32[], to the state before the first step. One function, so that JAX traces it once. element: the arrays of
    one row of a batch, by name.
    """

    run: Run
    mesh: Mesh | AbstractMesh
    model: Model
    attention: AttentionChoice | None
    loss_chunks: int
    make_optimizer: MakeOptimizer
    objective: Objective
    make_state: Callable[[Any], State]
    placement: Placement
    shapes: State
    element: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch."""
        return rows_of(self.element, self.run.config.train.batch)

    @property
    def shardings(self) -> State:
        """Where each part of the state goes."""
        place = self.placement
        whole = place.replicated()
        memory = "pinned_host" if self.run.config.optimizer.offload == "host" else None
        moments = place.optimizer(self.shapes.opt_state, memory)
        # The window of losses is a few numbers, which every device keeps.
        losses = jax.tree.map(lambda _: whole, self.shapes.losses)
        return State(whole, place.params, moments, losses, place.inputs(self.shapes.variables, "variables"))

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Where each array of a batch goes."""
        return self.placement.inputs(self.batch_shapes)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(x.size for x in jax.tree.leaves(self.shapes.params))

    def init(self) -> State:
        """The state before the first step, born sharded; the same values on every mesh."""
        # The seed is an argument. As a constant it would give each seed a program of its own, and the compilation cache would miss.
        return jax.jit(self.make_state, out_shardings=self.shardings, compiler_options=_COMPILED_ONCE)(np.uint32(self.run.config.run.seed))

    def settings(self, step: int) -> np.ndarray:
        """The settings of a step, f32[3]: the third argument of the compiled step."""
        return settings_of_step(self.run.config.optimizer, self.run.steps, step)

    def with_epochs(self, samples_of_epoch: int, step: int = 0, samples: int = 0) -> Setup:
        """The setup with the number of steps that `train.epochs` makes, for a run that has taken `step` steps and read `samples` samples.

        The last step completes the last epoch, whatever batches the steps so far had.
        """
        train = self.run.config.train
        if train.epochs is None:
            return self
        left = math.ceil(train.epochs * samples_of_epoch) - samples
        return replace(self, run=replace(self.run, epoch_steps=max(step - (-left // train.batch), 1)))

    def train_step(self) -> Any:
        """The step under jax.jit: (state, batch, settings) → (state, metrics). The state's buffers are donated."""

        def pin(gradients: Any) -> Any:
            return jax.lax.with_sharding_constraint(gradients, self.placement.gradients)

        config, optimizer = self.run.config.train, self.run.config.optimizer
        step = make_train_step(
            self.objective,
            self.make_optimizer,
            accumulate=config.accumulate,
            pin_gradients=pin,
            clips=optimizer.clip is not None,
            spikes=config.skip_spikes,
            update=update_in_turn(self.placement) if optimizer.offload == "host" else update_all,
        )
        shardings = self.shardings
        whole = self.placement.replicated()
        return jax.jit(
            step,
            in_shardings=(shardings, self.batch_shardings, whole),
            # The new state has the layout of the old one, the only one that the compiled step takes.
            out_shardings=(shardings, whole),
            # The new state takes the memory of the old one.
            donate_argnums=0,
        )

    def compile_train_step(self) -> Any:
        """The compiled step."""
        return self.train_step().lower(*self.step_shapes).compile()

    @property
    def step_shapes(self) -> tuple[Any, ...]:
        """The arguments of the step, as shapes."""
        return self.shapes, self.batch_shapes, jax.ShapeDtypeStruct((len(Settings._fields),), jnp.float32)

    def compile_eval_step(self, batch: int) -> Any:
        """The compiled evaluation of this many rows: (parameters, variables, batch) → by name, a sum and its weight."""
        shardings, whole = self.shardings, self.placement.replicated()
        jitted = jax.jit(
            make_eval_step(self.objective), in_shardings=(shardings.params, shardings.variables, self.batch_shardings), out_shardings=whole
        )
        return jitted.lower(self.shapes.params, self.shapes.variables, rows_of(self.element, batch)).compile()


def prepare(
    run: Run,
    *,
    num_devices: int | None = None,
    like: Any = None,
    devices: Sequence[Any] | None = None,
    element: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a device such as those will be, which may be only described. devices: those of the mesh; all that JAX finds if there are none.
    element: the arrays of one row of data of the user's own; without it the data is opened.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config = run.config
    element = element or _element(run)
    mesh, rules = _mesh_and_rules(run, num_devices, devices)
    if like is not None and isinstance(mesh, AbstractMesh):
        # What is traced inside of a shard_map names the kind of device.
        mesh = mesh.update(abstract_device=Mesh([like], ("one",)).abstract_mesh.abstract_device)
    # The loss runs on one part of the batch at a time, so the layout of its inputs is checked at the shape of a part.
    part = rows_of(element, config.train.batch // config.train.accumulate)
    attention: AttentionChoice | None = None
    if isinstance(config.model, OwnModel):
        model = own_model(config.model, run.code, run.where, partial(_call_on_zeros, part, _own_loss(run)))
    else:
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else like
        attention = _attention(run, config.model, device, shares_stage=_shares_stage(run, mesh))
        model = build(config.model, config.train.remat, attention.kernel)
    chunks = _loss_chunks(run, mesh)
    objective = _objective(run, model, chunks, rules, mesh)
    # Under jit, what is traced here is not traced again where the state is made.
    init = jax.jit(model.init)
    # Even the key is only a shape: nothing is computed where the devices may be absent.
    params, variables = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    problems = tuple(batch_problems(run, mesh.shape))
    placement = jgt.place(objective.loss, rules, mesh, params, variables, part, pipeline=run.pipeline, state="variables", problems=problems)
    _check_remat(run, placement.tensors)
    make_optimizer = _optimizer(run, model, placement)
    make_state = _state_maker(init, make_optimizer, config.train.skip_spikes)
    return Setup(
        run=run,
        mesh=mesh,
        model=model,
        attention=attention,
        loss_chunks=chunks,
        make_optimizer=make_optimizer,
        objective=objective,
        make_state=make_state,
        placement=placement,
        shapes=jax.eval_shape(make_state, jax.ShapeDtypeStruct((), jnp.uint32)),
        element=element,
    )


def _element(run: Run) -> Mapping[str, jax.ShapeDtypeStruct]:
    """The arrays of one row of a batch."""
    if isinstance(run.config.data, OwnData):
        return open_own(run.config.data, run.code, run.where, seq=run.config.model.seq, vocab=run.config.model.vocab).element
    seq = (run.config.model.seq,)
    kinds = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(seq, kind) for name, kind in kinds.items()}


def _own_loss(run: Run) -> Callable[..., Any] | None:
    name = run.own("train.loss")
    return None if name is None else load_object(name, "train.loss", run.code, run.where("train.loss"))


def _call_on_zeros(batch: Mapping[str, jax.ShapeDtypeStruct], loss: Callable[..., Any] | None, module: Any) -> Any:
    """The loss of a batch of zeros, or the model's result without a loss of the user's own."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
    return module(zeros["inputs"]) if loss is None else loss(module, zeros)


def _objective(run: Run, model: Model, chunks: int, rules: Rules, mesh: Mesh | AbstractMesh) -> Objective:
    """The loss under the rules. The step, the placement and, where it makes no difference, the evaluation share one trace of it."""
    own = _own_loss(run)
    # In a pipeline a device meets its own rows alone.
    groups = _num_shards(run, mesh)[0] if run.pipeline is None else 1
    tokens = make_loss(lambda module, x: module.features(x), chunks=chunks, groups=groups) if model.has_features else loss_of_logits

    def sharded(is_training: bool) -> ShardedLoss:
        if own is None:
            plain = token_objective(model, tokens, f"{run.where('model.kind')}: model.kind", is_training=is_training)
        else:
            plain = own_objective(model, own, run.where("train.loss"), is_training=is_training)
        return jgt.shard(plain, rules, mesh, pipeline=run.pipeline, state="variables")

    loss = sharded(True)
    is_same = not model.is_trained_differently and (own is None or "train" not in inspect.signature(own).parameters)
    return Objective(loss=loss, evaluated=loss if is_same else sharded(False), is_token_loss=own is None)


def roles_of(model: Model, placement: Placement) -> Any:
    """The role of each parameter, as a tree like theirs."""
    return jax.tree.unflatten(placement.tree, [model.role(p.path, len(p.shape) - len(p.sliced)) for p in placement.parameters])


def _optimizer(run: Run, model: Model, placement: Placement) -> MakeOptimizer:
    config = run.config.optimizer
    if isinstance(config, OwnOptimizer):
        return own_optimizer(config, run.code, run.where)
    return build_optimizer(config, roles_of(model, placement), dtype=compute_type(run.config.model), map_matrices=placement.map_matrices)


def _shares_stage(run: Run, mesh: Mesh | AbstractMesh) -> bool:
    """Whether several devices of a pipeline's stage work on the same rows."""
    return run.pipeline is not None and bool(axes_inside(dict(mesh.shape), run.pipeline.axis, run.batch_dims[0]))


def _attention(run: Run, config: ModelConfig, device: Any, *, shares_stage: bool) -> AttentionChoice:
    """The attention kernel. Raises InputError where the file asks for one that cannot be had."""
    choice = choose_attention(config, device, shares_stage=shares_stage)
    if config.attention not in ("auto", choice.kernel.name):
        where = run.where("model.attention")
        raise InputError(
            [
                f"{where}: model.attention: {config.attention} is not available here: {choice.why}. "
                "Use auto, which takes it where it is available, or xla"
            ]
        )
    return choice


def _loss_chunks(run: Run, mesh: Mesh | AbstractMesh) -> int:
    """As few chunks as fit, or as many as the file says."""
    train, model, pipeline = run.config.train, run.config.model, run.pipeline
    # The rows whose logits exist at once: those of one part of the batch, in a pipeline those of one microbatch.
    rows = train.batch // train.accumulate // (1 if pipeline is None else pipeline.microbatches)
    return train.loss_chunks or num_chunks(
        rows, model.seq, model.vocab, mesh.size, local_seq=max(model.seq // _num_shards(run, mesh)[1], 1)
    )


def _num_shards(run: Run, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Over how many devices batch and sequence are split."""
    batch, sequence = (math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in run.batch_dims)
    return batch, sequence


def _check_remat(run: Run, tensors: Sequence[str]) -> None:
    """Raises InputError for names to keep that the model does not have."""
    remat = run.config.train.remat
    unknown = [name for name in remat if name not in tensors] if isinstance(remat, tuple) else []
    if unknown:
        where = run.where("train.remat")
        raise InputError([f"{where}: train.remat: the model has no tensor {name!r}. {nearest(name, tensors)}" for name in unknown])


def rows_of(element: Mapping[str, jax.ShapeDtypeStruct], rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch of rows, [rows, ...] each."""
    return {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in element.items()}


def _state_maker(init: Callable[[jax.Array], Any], make_optimizer: MakeOptimizer, spikes: SpikesConfig | None) -> Callable[[Any], State]:
    def make_state(seed: jax.Array) -> State:
        params, variables = init(jax.random.key(seed))
        # The state does not depend on the settings.
        opt_state = make_optimizer(Settings(lr=0.0, weight_decay=0.0, clip=0.0)).init(params)
        return State(jnp.zeros((), jnp.int32), params, opt_state, no_losses(spikes), variables)

    return make_state


def _mesh_and_rules(run: Run, num_devices: int | None, devices: Sequence[Any] | None) -> tuple[Mesh | AbstractMesh, Rules]:
    where = f"{run.where('mesh')}: mesh"
    if run.rules is None:
        if num_devices is None and jax.process_count() > 1:
            raise InputError(
                [f"{run.where('rules')}: rules: {jax.process_count()} processes need rules; without them a run is on one device"]
            )
        alone = {"data": 1}
        mesh = jgt.make_mesh(alone, devices=(devices or jax.devices())[:1]) if num_devices is None else jgt.abstract_mesh(alone)
        return mesh, Rules(default="replicate")
    order = _axis_names(run)
    if num_devices is not None:
        return jgt.abstract_mesh(run.mesh, num_devices=num_devices, axis_names=order, where=where), run.rules
    return jgt.make_mesh(run.mesh, devices=devices, axis_names=order, where=where), run.rules


def _axis_names(run: Run) -> list[str]:
    """The mesh's axes with a pipeline's right behind those of the batch, wherever the file places it."""
    names = list(run.mesh)
    if run.pipeline is None or run.pipeline.axis not in names:
        return names
    # XLA requires the manual axes of nested shard_maps in the order of the mesh, and the outer one is over the batch.
    batch = set(run.batch_dims[0]) - {run.pipeline.axis}
    first = [name for name in names if name in batch]
    return [*first, run.pipeline.axis, *(name for name in names if name not in batch and name != run.pipeline.axis)]
