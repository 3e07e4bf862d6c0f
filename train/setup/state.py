"""The forms of a run's state: as a step has it, as a checkpoint has it, and as it is evaluated.

Between steps, parameters may have other shapes than in the model (`Storage`), and with phases there is a copy for each replica. A
checkpoint has the shapes of the model, so it fits any mesh and schedule. An evaluation needs the parameters of one replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt import Storage

from ..step.gradients import GradientSum
from ..step.optimizer import MakeOptimizer, Settings
from ..step.state import OPTIONAL, State, Tree
from ..step.step import StepFeatures
from ..step.sync.phases import Phases, mean_of_replicas
from ..step.trained import Trained, merged

COMPILED_ONCE = {"xla_backend_optimization_level": 1}
"""For a program that runs once, LLVM's expensive passes take longer than they save."""


# JAX finds the trace of `make_state` by this very object.
@dataclass(frozen=True, kw_only=True, eq=False)
class FirstState:
    """Makes the state before the first step. init: makes parameters and variables from a key."""

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    storage: Storage
    trained: Trained
    gradients: GradientSum
    make_optimizer: MakeOptimizer
    features: StepFeatures
    phases: Phases | None

    def make_state(self, seed: jax.Array) -> State:
        """The state before the first step, from a seed, uint32[]."""
        # jgt checks programs with a scope of its own for what XLA computes wrongly.
        with jax.named_scope("jgt.state"):
            params, variables = self.init(jax.random.key(seed))
        params, frozen = self.trained.split(self.storage.entered(params))
        # The state does not depend on the settings.
        opt_state = self.make_optimizer(Settings(lr=0.0, weight_decay=0.0, clip=0.0)).init(params)
        losses, average = self.features.first_losses(), self.features.first_average(params)
        waiting = self.gradients.first_waiting(jax.eval_shape(self.storage.used, params))
        own = State(jnp.zeros((), jnp.int32), params, opt_state, variables, losses=losses, average=average, waiting=waiting)
        state = replace(own, frozen=frozen)
        return state if self.phases is None else self.phases.begin(state)


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """A run's state: its shapes, where each part goes, and conversions between its forms.

    storage: the places of the model's parameters, and how the state has them. trained: which of them are trained. phases: with `sync.every`
    above 1. offload: whether moments are in the host's memory between steps. shapes: the state's.
    """

    storage: Storage
    trained: Trained
    gradients: GradientSum
    features: StepFeatures
    phases: Phases | None
    offload: bool
    shapes: State

    @property
    def shardings(self) -> State:
        """Where each part of the state goes."""
        return self._shardings(self.shapes, is_saved=False)

    @property
    def saved_shapes(self) -> State:
        """The shapes of a state in a checkpoint. They are the model's own shapes, so a checkpoint fits any mesh and schedule."""
        return jax.eval_shape(self._leave, self.shapes) if self.storage.reshapes else self.shapes

    @property
    def saved_shardings(self) -> State:
        """Where each part of a state goes before it is saved, and after it is restored."""
        return self._shardings(self.saved_shapes, is_saved=True)

    @property
    def saved_of_one(self) -> tuple[State, State]:
        """The shapes and shardings of one replica's state in a checkpoint; without phases, of the state."""
        shapes = self.saved_shapes if self.phases is None else self.phases.of_one(self.saved_shapes)
        return shapes, self._shardings_of_one(shapes, is_saved=True)

    @property
    def saved_params(self) -> tuple[Tree, Tree]:
        """The shapes and shardings of the model's parameters in a checkpoint."""
        shapes, shardings = self.saved_of_one
        return merged(shapes.params, shapes.frozen), merged(shardings.params, shardings.frozen)

    def _shardings(self, shapes: State, *, is_saved: bool) -> State:
        if self.phases is None:
            return self._shardings_of_one(shapes, is_saved=is_saved)
        return self.phases.lift(self._shardings_of_one(self.phases.of_one(shapes), is_saved=is_saved))

    def _shardings_of_one(self, one: State, *, is_saved: bool) -> State:
        place = self.storage.saved if is_saved else self.storage.placement
        # Gradients that wait for the next step have the form of the parameters in use.
        used = self.storage.model if is_saved else self.storage.in_use.placement
        whole = place.replicated()
        moments = place.optimizer(one.opt_state, "pinned_host" if self.offload else None)
        variables = place.inputs(one.variables, "variables")
        # The window of losses is a few numbers, which every device keeps. The average is laid out as the moments: an update reads both, and
        # with ZeRO each device keeps its part alone.
        losses = jax.tree.map(lambda _: whole, one.losses)
        average = None if one.average is None else self.trained.of(place.gradients)
        sync = self.gradients.sync
        waiting = None if sync is None or one.waiting is None else jax.tree.map(sync.lift, self.trained.of(used.params))
        params, frozen = self.trained.split(place.params)
        return State(cast(Any, whole), params, moments, variables, losses=losses, average=average, waiting=waiting, frozen=frozen)

    def to_save(self, state: State) -> State:
        """The state as a checkpoint has it. The state remains."""
        if not self.storage.reshapes:
            return state
        # Without a copy of frozen parameters that are not saved.
        left = self._left(replace(state, frozen={}))
        return replace(left, frozen=self._left_frozen(state.frozen)) if state.frozen else left

    def from_saved(self, state: State) -> State:
        """The inverse of `to_save`. The state may lack optional parts."""
        if not self.storage.reshapes:
            return state
        shardings = replace(self.shardings, **without_arrays(state))
        return jax.jit(self._enter, out_shardings=shardings, compiler_options=COMPILED_ONCE)(state)

    def model_params(self, params: Tree) -> Tree:
        """The model's parameters, from the state's."""
        if not self.storage.forms:
            return params
        return jax.jit(self.storage.left, out_shardings=self.storage.model.params, compiler_options=COMPILED_ONCE)(params)

    def stored_params(self, params: Tree) -> Tree:
        """The inverse of `model_params`."""
        if not self.storage.forms:
            return params
        return jax.jit(self.storage.entered, out_shardings=self.storage.placement.params, compiler_options=COMPILED_ONCE)(params)

    def _enter(self, state: State) -> State:
        return self._converted(state, lambda storage: storage.entered)

    def _leave(self, state: State) -> State:
        return self._converted(state, lambda storage: storage.left)

    def _converted(self, state: State, conversion: Callable[[Storage], Callable[..., Tree]]) -> State:
        one, sync, waiting = functools.partial(_converted, convert=conversion(self.storage)), self.gradients.sync, state.waiting
        if self.phases is not None:
            return self.phases.convert(state, one)
        if sync is not None and waiting is not None:
            # Gradients have the form of the parameters in use.
            waiting = sync.map(conversion(self.storage.in_use))(waiting)
        return replace(one(state), anchor=None, momentum=None, waiting=waiting)

    @functools.cached_property
    def _left(self) -> Callable[[State], State]:
        return jax.jit(self._leave, out_shardings=replace(self.saved_shardings, frozen={}), compiler_options=COMPILED_ONCE)

    @functools.cached_property
    def _left_frozen(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.storage.left, out_shardings=self.saved_shardings.frozen, compiler_options=COMPILED_ONCE)

    def last_params(self, state: State) -> Tree:
        """The parameters as the state has them: its own, or with phases the last exchange's."""
        return merged(state.params if state.anchor is None else state.anchor, state.frozen)

    def eval_params(self, state: State) -> Tree:
        """The parameters to evaluate, as the state has them: their average, if the run has one, or its last ones."""
        average = state.average
        if average is None:
            return self.last_params(state)
        # The mean of the replicas' averages is the average of their means.
        average = average if self.phases is None else _mean(average, self.trained.of(self.storage.placement.gradients))
        return merged(self.averaged_params(average), state.frozen)

    def eval_variables(self, state: State) -> Tree:
        """The model's variables to evaluate with: the state's own, with phases the mean of the replicas'."""
        variables = state.variables
        return variables if self.phases is None else _mean(variables, self.saved_of_one[1].variables)

    def with_model(self, state: State, params: Tree, statistics: Tree) -> State:
        """A state before the first step, with other parameters, as the state has them, and with other values of some variables."""
        phases, variables = self.phases, merged(self.eval_variables(state), statistics)
        params, frozen = self.trained.split(params)
        state = replace(state, frozen=frozen)
        if phases is None:
            return self.with_average(replace(state, params=params, variables=variables))
        spread = jax.jit(phases.spread, out_shardings=(self.shardings.params, self.shardings.variables))
        spread_params, variables = spread((params, variables))
        return self.with_average(replace(state, params=spread_params, variables=variables, anchor=params))

    def with_average(self, state: State) -> State:
        """The state with an average of the parameters that starts here, if the run has one."""
        first = jax.jit(self.features.first_average, out_shardings=self.shardings.average)
        return replace(state, average=first(state.params))

    @functools.cached_property
    def averaged_params(self) -> Callable[[Tree], Tree]:
        """A function from an average, in f32 and laid out like moments, to the parameters that are trained."""

        def to_parameters(average: Tree) -> Tree:
            return jax.tree.map(lambda a, p: a.astype(p.dtype), average, self.shapes.params)

        return jax.jit(to_parameters, out_shardings=self.trained.of(self.storage.placement.params))


def without_arrays(state: State) -> dict[str, None]:
    """The optional parts that a state lacks, for the shardings of such a state."""
    return dict.fromkeys(OPTIONAL - state.arrays().keys())


def _mean(tree: Tree, shardings: Tree) -> Tree:
    """The mean of all replicas' arrays."""
    mean = functools.partial(jax.tree.map, mean_of_replicas)
    return jax.jit(mean, out_shardings=shardings, compiler_options=COMPILED_ONCE)(tree)


def _converted(state: State, convert: Callable[..., Tree]) -> State:
    """The state in another form of the parameters, and of everything that has their shapes."""
    average = None if state.average is None else convert(state.average, as_state=True)
    opt_state = convert(state.opt_state, as_state=True)
    return replace(state, params=convert(state.params), opt_state=opt_state, average=average, frozen=convert(state.frozen))
