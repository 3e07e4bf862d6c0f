"""Everything of a run that exists before its first step: devices, model, placement, compiled functions.

Training, `--dry-run`, `--replay`, `jgt check` and `jgt plan` have to speak of one program, or a check could pass where training fails. So
all of them call `prepare`, which makes the whole program from shapes: mesh, model, loss under its rules, optimizer, and the place of
every array. Nothing in it needs devices: on an abstract mesh, a laptop checks a run for hardware that it does not have.

The invariant: whatever is wrong with rules, mesh and shapes is raised by `prepare`, before anything is compiled or allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jgt
from jgt.document import InputError, nearest
from jgt.pipeline.layout import axes_inside
from jgt.rules import Rules
from jgt.sharding.placement import Placement

from .config import Run, batch_problems
from .models.attention import AttentionChoice, choose_attention
from .models.decoder import Model, build
from .models.linear import compute_type
from .sections import SpikesConfig
from .step.loss import Arrays, Loss, make_loss, num_chunks
from .step.optimizer import build_optimizer
from .step.step import State, make_eval_step, make_train_step, no_losses
from .step.update import update_all, update_in_turn

_COMPILED_ONCE = {"xla_backend_optimization_level": 1}
"""For a program that runs once, LLVM's expensive passes take longer than they save."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run's parts, their shapes and where they go; built by `prepare`, nothing allocated.

    make_state: from a seed, uint32[], to the state before the first step. One function, so that JAX traces it once.
    """

    run: Run
    mesh: Mesh | AbstractMesh
    model: Model
    attention: AttentionChoice
    loss_chunks: int
    optimizer: optax.GradientTransformation
    loss: Loss
    make_state: Callable[[Any], State]
    placement: Placement
    shapes: State
    batch_shapes: dict[str, jax.ShapeDtypeStruct]

    @property
    def shardings(self) -> State:
        """Where each part of the state goes."""
        place = self.placement
        whole = place.replicated()
        memory = "pinned_host" if self.run.config.optimizer.offload == "host" else None
        moments = place.optimizer(self.shapes.opt_state, memory)
        # The window of losses is a few numbers, which every device keeps.
        return State(whole, place.params, moments, jax.tree.map(lambda _: whole, self.shapes.losses))

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

    def train_step(self) -> Any:
        """The step under jax.jit: (state, batch) → (state, metrics). The state's buffers are donated."""

        def pin(gradients: Any) -> Any:
            return jax.lax.with_sharding_constraint(gradients, self.placement.gradients)

        config, optimizer = self.run.config.train, self.run.config.optimizer
        step = make_train_step(
            self.loss,
            self.optimizer,
            accumulate=config.accumulate,
            pin_gradients=pin,
            clip=optimizer.clip,
            spikes=config.skip_spikes,
            update=update_in_turn(self.placement) if optimizer.offload == "host" else update_all,
        )
        shardings = self.shardings
        whole = self.placement.replicated()
        return jax.jit(
            step,
            in_shardings=(shardings, self.batch_shardings),
            # The new state has the layout of the old one, the only one that the compiled step takes.
            out_shardings=(shardings, {"loss": whole, "grad_norm": whole, "applied": whole}),
            # The new state takes the memory of the old one.
            donate_argnums=0,
        )

    def compile_train_step(self) -> Any:
        """The compiled step."""
        return self.train_step().lower(self.shapes, self.batch_shapes).compile()

    def compile_eval_step(self) -> Any:
        """The compiled evaluation: (parameters, batch) → (Σ weights · nats, Σ weights)."""
        whole = self.placement.replicated()
        jitted = jax.jit(
            make_eval_step(self.loss), in_shardings=(self.placement.params, self.batch_shardings), out_shardings=(whole, whole)
        )
        return jitted.lower(self.shapes.params, self.batch_shapes).compile()


def prepare(run: Run, *, num_devices: int | None = None, like: Any = None, devices: Sequence[Any] | None = None) -> Setup:
    """Traces the run's loss and places everything. With `num_devices` no device is touched: the mesh is abstract.

    like: a device such as those will be, which may be only described. devices: those of the mesh; all that JAX finds if there are none.

    Raises InputError with every misfit of rules, mesh and shapes.
    """
    config = run.config
    mesh, rules = _mesh_and_rules(run, num_devices, devices)
    if like is not None and isinstance(mesh, AbstractMesh):
        # What is traced inside of a shard_map names the kind of device.
        mesh = mesh.update(abstract_device=Mesh([like], ("one",)).abstract_mesh.abstract_device)
    attention = _attention(run, mesh.devices.flat[0] if isinstance(mesh, Mesh) else like, shares_stage=_shares_stage(run, mesh))
    model = build(config.model, config.train.remat, attention.kernel)
    chunks = _loss_chunks(run, mesh)
    # In a pipeline a device meets its own rows alone.
    plain = make_loss(model.features, chunks=chunks, groups=_num_shards(run, mesh)[0] if run.pipeline is None else 1)
    # The step, the evaluation and the placement share one trace of the loss.
    loss = jgt.shard(plain, rules, mesh, pipeline=run.pipeline)
    # The loss runs on one part of the batch at a time, so the layout of its inputs is checked at the shape of a part.
    part = batch_shapes(config.train.batch // config.train.accumulate, config.model.seq)
    # Under jit, what is traced here is not traced again where the state is made.
    init = jax.jit(model.init)
    # Even the key is only a shape: nothing is computed where the devices may be absent.
    params = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    placement = jgt.place(loss, rules, mesh, params, part, pipeline=run.pipeline, problems=tuple(batch_problems(run, mesh.shape)))
    _check_remat(run, placement.tensors)
    optimizer = build_optimizer(
        config.optimizer, config.train.steps, model.roles, dtype=compute_type(config.model), map_matrices=placement.map_matrices
    )
    make_state = _state_maker(init, optimizer, config.train.skip_spikes)
    return Setup(
        run=run,
        mesh=mesh,
        model=model,
        attention=attention,
        loss_chunks=chunks,
        optimizer=optimizer,
        loss=loss,
        make_state=make_state,
        placement=placement,
        shapes=jax.eval_shape(make_state, jax.ShapeDtypeStruct((), jnp.uint32)),
        batch_shapes=batch_shapes(config.train.batch, config.model.seq),
    )


def _shares_stage(run: Run, mesh: Mesh | AbstractMesh) -> bool:
    """Whether several devices of a pipeline's stage work on the same rows."""
    return run.pipeline is not None and bool(axes_inside(dict(mesh.shape), run.pipeline.axis, run.batch_dims[0]))


def _attention(run: Run, device: Any, *, shares_stage: bool) -> AttentionChoice:
    """The attention kernel. Raises InputError where the file asks for one that cannot be had."""
    choice = choose_attention(run.config.model, device, shares_stage=shares_stage)
    if run.config.model.attention not in ("auto", choice.kernel.name):
        where = run.where("model.attention")
        raise InputError(
            [
                f"{where}: model.attention: {run.config.model.attention} is not available here: {choice.why}. "
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


def batch_shapes(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch, [batch, seq] each."""
    kinds: Arrays | dict[str, Any] = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((batch, seq), kind) for name, kind in kinds.items()}


def _state_maker(
    init: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation, spikes: SpikesConfig | None
) -> Callable[[Any], State]:
    def make_state(seed: jax.Array) -> State:
        params = init(jax.random.key(seed))
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), no_losses(spikes))

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
