"""Phases: steps in which groups of devices train for themselves, each followed by an exchange of their parameters.

With `sync: {axis: pod, every: 50}` each pod is a replica of the run. For 50 steps it computes its own gradients, its own updates and its
own moments, from its own rows, and sends nothing to other pods. Then all pods exchange how far they have come since the last exchange,
and continue from one point: the mean of their parameters (local SGD), or what Nesterov's momentum makes of the mean change (DiLoCo).

Both are programs of their own. So the program of a step has no collective over the axis, for everybody to see in `jgt plan`, and the host
decides when the other one runs. A state has a dim of replicas, [R, ...], for parameters, moments and the window of losses. The parameters
of the last exchange, the anchor, are whole: evaluations, samples and other runs use them, since the replicas differ in the middle of a
phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgt.replicas import Replicas, exchange

from ..step.step import State, StepFn
from .config import SyncConfig

_OF_REPLICAS = ("params", "opt_state", "losses")
"""The parts of a state that each replica has for itself."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The replicas of a run with phases."""

    replicas: Replicas
    config: SyncConfig

    def begun(self, state: State) -> State:
        """A state with phases at an exchange, from one without: all replicas are equal. The momentum is zero if the state has none."""
        momentum = () if self.config.outer is None else state.momentum or jax.tree.map(jnp.zeros_like, state.params)
        return self.spread(state)._replace(anchor=state.params, momentum=momentum)

    def spread(self, state: State) -> State:
        """A state whose parts of replicas, [...] each, are the same for all: [R, ...]."""
        return _mapped(lambda x: jnp.broadcast_to(x[None], (self.replicas.count, *x.shape)), state)

    def of_one(self, shapes: State) -> State:
        """The shapes of one replica's state, without phases."""
        one = _mapped(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        return one._replace(anchor=(), momentum=())

    def lifted(self, shardings: State) -> State:
        """The shardings of a state, from those of one replica's."""
        momentum = () if self.config.outer is None else shardings.params
        return _mapped(self.replicas.lifted, shardings)._replace(anchor=shardings.params, momentum=momentum)

    def converted(self, state: State, convert: Callable[[State], State]) -> State:
        """The state with each replica's part converted, and its anchor and momentum as parameters are."""
        after = self.replicas.map(convert, (_AXES,), _AXES)(state._replace(anchor=(), momentum=()))
        anchor, momentum = (x if x == () else convert(_only_params(x)).params for x in (state.anchor, state.momentum))
        return after._replace(anchor=anchor, momentum=momentum)

    def step(self, step: StepFn) -> StepFn:
        """The step of every replica, on its own rows. Metrics are [R]."""

        def run(state: State, batch: dict[str, jax.Array], settings: jax.Array) -> tuple[State, dict[str, jax.Array]]:
            one = state._replace(anchor=(), momentum=())
            after, metrics = self.replicas.map(step, (_AXES, 0, None), (_AXES, 0))(one, self.replicas.rows(batch), settings)
            return after._replace(anchor=state.anchor, momentum=state.momentum), metrics

        return run

    def exchanged(self, state: State, shardings: Any) -> State:
        """The state after an exchange: all replicas have the new anchor as their parameters. shardings: of the anchor."""
        outer = self.config.outer
        change = jax.tree.map(lambda a, p: (a[None] - p).astype(jnp.float32), state.anchor, state.params)
        sums, _ = exchange(change, self.replicas, shardings, self.config.wire)
        mean = jax.tree.map(lambda x: x / self.replicas.count, sums)
        momentum = state.momentum
        if outer is not None:
            momentum = jax.tree.map(lambda m, g: outer.momentum * m + g, momentum, mean)
            # Nesterov: with the momentum as the next step would have it.
            mean = jax.tree.map(lambda m, g: outer.lr * (g + outer.momentum * m), momentum, mean)
        anchor = jax.tree.map(lambda a, g: (a - g).astype(a.dtype), state.anchor, mean)
        params = jax.tree.map(lambda a: jnp.broadcast_to(a[None], (self.replicas.count, *a.shape)), anchor)
        return state._replace(params=params, anchor=anchor, momentum=momentum)


def _mapped(fn: Callable[[Any], Any], state: State) -> State:
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in _OF_REPLICAS})


_AXES = State(*(0 if name in _OF_REPLICAS else None for name in State._fields))
"""For jax.vmap: which parts of a state have a dim of replicas."""


def _only_params(params: Any) -> State:
    return State((), params, ())
