"""The forms of a run's state: as a step has it, as a checkpoint has it, and as it is evaluated.

Between steps, parameters may have other shapes than in the model (`Storage`), and with phases there is a copy for each replica. A
checkpoint has the shapes of the model, so it fits any mesh and schedule. An evaluation needs the parameters of one replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.sharding.placement import Placement
from jgt.sharding.storage import Storage

from ..config import Run
from ..step.optimizer import MakeOptimizer
from ..step.parts import first_residual, waiting_type
from ..step.schedule import Settings
from ..step.step import State, first_average, no_losses
from ..sync.phases import Phases, mean_of_replicas
from .apart import gradient_replicas, residual_shardings

COMPILED_ONCE = {"xla_backend_optimization_level": 1}
"""For a program that runs once, LLVM's expensive passes take longer than they save."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """A run's state: its shapes, where each part goes, and conversions between its forms.

    placement: of the model's parameters. storage: how the state has them, where that is another form. phases: with `sync.every` above 1.
    shapes: of the state.
    """

    run: Run
    mesh: Mesh | AbstractMesh
    placement: Placement
    storage: Storage | None
    phases: Phases | None
    shapes: State

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
        """The shapes of a state in a checkpoint. They are the model's own shapes, so a checkpoint fits any mesh and schedule."""
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


def without_arrays(state: State) -> dict[str, Any]:
    """The parts that a state may lack, and does, for the shardings of such a state."""
    return {name: () for name in ("losses", "average", "momentum", "residual", "waiting") if not jax.tree.leaves(getattr(state, name))}


def _converted(state: State, convert: Callable[..., Any]) -> State:
    """The state in another form of the parameters, and of everything that has their shapes."""
    moments, average = convert(state.opt_state, as_state=True), convert(state.average, as_state=True)
    return state._replace(params=convert(state.params), opt_state=moments, average=average)


def state_maker(
    init: Callable[[jax.Array], Any], make_optimizer: MakeOptimizer, run: Run, storage: Storage | None, phases: Phases | None, replicas: int
) -> Callable[[Any], State]:
    """The function from a seed to the state. replicas: the size of the axis of `sync`."""
    config, sync = run.config.train, run.config.sync

    def used(params: Any) -> Any:
        return params if storage is None else storage.used(params)

    def make_state(seed: jax.Array) -> State:
        made, variables = init(jax.random.key(seed))
        params = made if storage is None else storage.entered(made)
        # The state does not depend on the settings.
        opt_state = make_optimizer(Settings(lr=0.0, weight_decay=0.0, clip=0.0)).init(params)
        losses, average = no_losses(config.skip_spikes), first_average(params, config.ema)
        state = State(jnp.zeros((), jnp.int32), params, opt_state, losses, variables, average)
        if sync is not None and sync.feedback:
            state = state._replace(residual=first_residual(used(params), replicas))
        if sync is not None and sync.late:
            state = state._replace(waiting=first_residual(used(params), replicas, waiting_type(sync.wire)))
        return state if phases is None else phases.begun(state)

    return make_state
