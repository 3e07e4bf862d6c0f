"""What exists of a run before its first step: the shapes of its state, where everything goes, and its compiled functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.document import InputError
from jgt.sharding.placement import Placement
from jgt.sharding.storage import Storage

from ..config import Run
from ..models.attention import CUDNN, AttentionChoice, has_foreign_mask
from ..models.model import Model
from ..models.remat import Remat
from ..step.objective import Objective
from ..step.optimizer import MakeOptimizer
from ..step.parts import Parts
from ..step.schedule import Settings, settings_of_step
from ..step.step import State, first_average, make_eval_step, make_train_step
from ..step.update import update_all, update_in_turn
from ..sync.exchanges import ExchangePrograms, Exchanges
from ..sync.phases import Phases, mean_of_replicas
from .apart import apart_of, gradient_replicas, residual_shardings

COMPILED_ONCE = {"xla_backend_optimization_level": 1}
"""For a program that runs once, LLVM's expensive passes take longer than they save."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run's parts, their shapes and where they go; built by `prepare`, nothing allocated.

    make_state: from a seed, uint32[], to the state before the first step. One function, so that JAX traces it once. placement: of the
    model's parameters. storage: how the state has them, where that is another form. phases: with `sync.every` above 1. shapes: of the
    state. element: the arrays of one row
    of a batch, by name. grouped: how the matmuls of experts run, as in the log; empty without experts. remat: `train.remat`, or what `auto`
    took. compiled: the step, if it is compiled already.
    """

    run: Run
    mesh: Mesh | AbstractMesh
    model: Model
    attention: AttentionChoice | None
    grouped: str
    remat: Remat
    loss_chunks: int
    make_optimizer: MakeOptimizer
    objective: Objective
    make_state: Callable[[Any], State]
    placement: Placement
    storage: Storage | None
    phases: Phases | None
    shapes: State
    element: Mapping[str, jax.ShapeDtypeStruct]
    compiled: Any = None

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch."""
        return rows_of(self.element, self.run.config.train.batch)

    @property
    def stored(self) -> Placement:
        """The placement of the parameters as the state has them."""
        return self.placement if self.storage is None else self.storage.placement

    @property
    def _used(self) -> Placement:
        """The placement of the parameters as the loss takes them."""
        return self.placement if self.storage is None else self.storage.in_use.placement

    @property
    def shardings(self) -> State:
        """Where each part of the state goes."""
        return self._shardings(self.stored, self._used, self.shapes)

    @property
    def saved_shapes(self) -> State:
        """The shapes of a state in a checkpoint: the model's, so that it fits any mesh and schedule."""
        return jax.eval_shape(self._leave, self.shapes) if self._reshapes else self.shapes

    @property
    def saved_shardings(self) -> State:
        """Where each part of a state goes before it is saved, and after it is restored."""
        return self._shardings(self._saved, self.placement, self.saved_shapes)

    @property
    def _saved(self) -> Placement:
        """The placement of the parameters in the model's shapes, before they are saved."""
        return self.placement if self.storage is None else self.storage.saved

    @property
    def saved_of_one(self) -> tuple[State, State]:
        """The shapes and shardings of one replica's state in a checkpoint; without phases, of the state."""
        shapes = self.saved_shapes if self.phases is None else self.phases.of_one(self.saved_shapes)
        return shapes, self._shardings_of_one(self._saved, self.placement, shapes)

    @property
    def _reshapes(self) -> bool:
        return self.storage is not None and self.storage.reshapes

    def _shardings(self, place: Placement, used: Placement, shapes: State) -> State:
        if self.phases is None:
            return self._shardings_of_one(place, used, shapes)
        return self.phases.lifted(self._shardings_of_one(place, used, self.phases.of_one(shapes)))

    def _shardings_of_one(self, place: Placement, used: Placement, one: State) -> State:
        """place: of the parameters. used: of the gradients that are kept for the next step."""
        whole = place.replicated()
        memory = "pinned_host" if self.run.config.optimizer.offload == "host" else None
        moments = place.optimizer(one.opt_state, memory)
        # The window of losses is a few numbers, which every device keeps.
        losses = jax.tree.map(lambda _: whole, one.losses)
        # The average as the moments: an update reads both, and with ZeRO each device keeps its part alone.
        average = () if one.average == () else place.gradients
        variables = place.inputs(one.variables, "variables")
        residual, waiting = (() if of == () else residual_shardings(self.run, self.mesh, used) for of in (one.residual, one.waiting))
        return State(whole, place.params, moments, losses, variables, average, residual=residual, waiting=waiting)

    def to_save(self, state: State) -> State:
        """The state as a checkpoint has it. The state remains."""
        return self._left(state) if self._reshapes else state

    def from_saved(self, state: State) -> State:
        """The inverse of `to_save`. The state may lack its losses, average, momentum, residual or waiting gradients."""
        if not self._reshapes:
            return state
        absent = without_arrays(state)
        return jax.jit(self._enter, out_shardings=self.shardings._replace(**absent), compiler_options=COMPILED_ONCE)(state)

    def model_params(self, params: Any) -> Any:
        """The model's parameters, of those that the state has."""
        if self.storage is None:
            return params
        return jax.jit(self.storage.left, out_shardings=self.placement.params, compiler_options=COMPILED_ONCE)(params)

    def stored_params(self, params: Any) -> Any:
        """The inverse of `model_params`."""
        if self.storage is None:
            return params
        return jax.jit(self.storage.entered, out_shardings=self.stored.params, compiler_options=COMPILED_ONCE)(params)

    def _enter(self, state: State) -> State:
        return self._converted(state, lambda storage: storage.entered)

    def _leave(self, state: State) -> State:
        return self._converted(state, lambda storage: storage.left)

    def _converted(self, state: State, conversion: Callable[[Storage], Callable[..., Any]]) -> State:
        storage = cast(Storage, self.storage)
        one = functools.partial(_converted, convert=conversion(storage))
        after = one(state) if self.phases is None else self.phases.converted(state, one)
        # Gradients are those of the parameters in use.
        residual, waiting = (
            () if of == () else gradient_replicas(self.run, self.mesh).map(conversion(storage.in_use))(of)
            for of in (state.residual, state.waiting)
        )
        return after._replace(residual=residual, waiting=waiting)

    @functools.cached_property
    def _left(self) -> Callable[[State], State]:
        return jax.jit(self._leave, out_shardings=self.saved_shardings, compiler_options=COMPILED_ONCE)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Where each array of a batch goes."""
        return self.placement.inputs(self.batch_shapes)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(p.shape) for p in self.placement.parameters)

    def init(self) -> State:
        """The state before the first step, born sharded; the same values on every mesh."""
        # The seed is an argument. As a constant it would give each seed a program of its own, and the compilation cache would miss.
        return jax.jit(self.make_state, out_shardings=self.shardings, compiler_options=COMPILED_ONCE)(np.uint32(self.run.config.run.seed))

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

    def evaluated(self, state: State) -> Any:
        """The parameters to evaluate, as the state has them: its own, with phases those of the last exchange, or their average."""
        own = state.params if state.anchor == () else state.anchor
        if state.average == ():
            return own
        # The mean of the replicas' averages is the average of their means.
        return self.averaged_params(state.average if self.phases is None else self._average_of_one(state.average))

    def evaluated_variables(self, state: State) -> Any:
        """What the model keeps beside its parameters, to evaluate with: the state's own, with phases the mean of the replicas'."""
        return state.variables if self.phases is None else self._variables_of_one(state.variables)

    @functools.cached_property
    def _variables_of_one(self) -> Callable[[Any], Any]:
        one = self.saved_of_one[1].variables
        return jax.jit(functools.partial(jax.tree.map, mean_of_replicas), out_shardings=one, compiler_options=COMPILED_ONCE)

    @functools.cached_property
    def _average_of_one(self) -> Callable[[Any], Any]:
        one = self.stored.gradients
        return jax.jit(functools.partial(jax.tree.map, mean_of_replicas), out_shardings=one, compiler_options=COMPILED_ONCE)

    def with_params(self, state: State, params: Any) -> State:
        """A state before the first step, with other parameters, as the state has them."""
        phases = self.phases
        if phases is None:
            return self.with_average(state._replace(params=params))

        def spread(params: Any) -> Any:
            return phases.spread(State(0, params, ())).params

        return self.with_average(state._replace(params=jax.jit(spread, out_shardings=self.shardings.params)(params), anchor=params))

    def with_average(self, state: State) -> State:
        """The state with an average of the parameters that starts here, if the run has one."""
        first = functools.partial(first_average, ema=self.run.config.train.ema)
        return state._replace(average=jax.jit(first, out_shardings=self.shardings.average)(state.params))

    @functools.cached_property
    def averaged_params(self) -> Callable[[Any], Any]:
        """From an average, in f32 and laid out like moments, to parameters."""

        def to_parameters(average: Any) -> Any:
            return jax.tree.map(lambda a, p: a.astype(p.dtype), average, self.shapes.params)

        return jax.jit(to_parameters, out_shardings=self.stored.params)

    def train_step(self) -> Any:
        """The step under jax.jit: (state, batch, settings) → (state, metrics). The state's buffers are donated."""

        def pin(gradients: Any) -> Any:
            return jax.lax.with_sharding_constraint(gradients, self.stored.gradients)

        config, optimizer = self.run.config.train, self.run.config.optimizer
        step = make_train_step(
            self.objective,
            self.make_optimizer,
            parts=Parts(
                count=1 if self.run.pipeline is not None else config.accumulate,
                pin=pin,
                apart=apart_of(self.run, self.mesh, self._used),
            ),
            clips=optimizer.clip is not None,
            spikes=config.skip_spikes,
            update=update_in_turn(self.placement) if optimizer.offload == "host" else update_all,
            ema=config.ema,
        )
        shardings = self.shardings
        whole = self.placement.replicated()
        # With phases each replica has metrics of its own, [R].
        told = whole if self.phases is None else self.phases.replicas.lifted(whole)
        return jax.jit(
            step if self.phases is None else self.phases.step(step),
            in_shardings=(shardings, self.batch_shardings, whole),
            # The new state has the layout of the old one, the only one that the compiled step takes.
            out_shardings=(shardings, told),
            # The new state takes the memory of the old one.
            donate_argnums=0,
        )

    @functools.cached_property
    def exchanges(self) -> ExchangePrograms | None:
        """The programs of exchanges; None without phases."""
        return None if self.phases is None else ExchangePrograms(phases=self.phases, shapes=self.shapes, shardings=self.shardings)

    def compile_exchanges(self) -> Exchanges | None:
        """The compiled exchanges; None without phases."""
        return None if self.exchanges is None else self.exchanges.compiled()

    def lower_train_step(self) -> jax.stages.Lowered:
        """The step as XLA will compile it."""
        return self.train_step().lower(*self.step_shapes)

    def compile_train_step(self, lowered: jax.stages.Lowered | None = None) -> Any:
        """The compiled step. Raises InputError if its attention would mask wrongly."""
        if self.compiled is not None:
            return self.compiled
        compiled = (self.lower_train_step() if lowered is None else lowered).compile()
        if self.attention is not None and self.attention.kernel is CUDNN and "segments" in self.element:
            _check_masks(self.run, compiled.as_text() or "")
        return compiled

    @property
    def step_shapes(self) -> tuple[Any, ...]:
        """The arguments of the step, as shapes."""
        return self.shapes, self.batch_shapes, jax.ShapeDtypeStruct((len(Settings._fields),), jnp.float32)

    def compile_eval_step(self, batch: int) -> Any:
        """The compiled evaluation of this many rows: (parameters, variables, batch) → by name, a sum and its weight."""
        whole, shapes = self.placement.replicated(), self.shapes
        params = shapes.params if self.phases is None else shapes.anchor
        # Only parameters may have other shapes in checkpoints.
        one, shardings = self.saved_of_one
        jitted = jax.jit(
            make_eval_step(self.objective),
            in_shardings=(self.stored.params, shardings.variables, self.batch_shardings),
            out_shardings=whole,
        )
        return jitted.lower(params, one.variables, rows_of(self.element, batch)).compile()


def without_arrays(state: State) -> dict[str, Any]:
    """The parts that a state may lack, and does, for the shardings of such a state."""
    return {name: () for name in ("losses", "average", "momentum", "residual", "waiting") if not jax.tree.leaves(getattr(state, name))}


def _converted(state: State, convert: Callable[..., Any]) -> State:
    """The state in another form of the parameters, and of everything that has their shapes."""
    moments, average = convert(state.opt_state, as_state=True), convert(state.average, as_state=True)
    return state._replace(params=convert(state.params), opt_state=moments, average=average)


def rows_of(element: Mapping[str, jax.ShapeDtypeStruct], rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch of rows, [rows, ...] each."""
    return {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in element.items()}


def _check_masks(run: Run, program: str) -> None:
    """Raises InputError if a device would mask its rows by those of others."""
    if has_foreign_mask(program):
        raise InputError(
            [
                f"{run.where('rules')}: inputs: the rules split the rows of attention, but not those of batch/segments, as cuDNN's kernel "
                "needs it with data.documents: mask. Split both over the same axes, or use model.attention: xla"
            ]
        )
