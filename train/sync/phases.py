"""Phases: steps in which groups of devices train for themselves, each followed by an exchange of their parameters.

With `sync: {axis: pod, every: 50}` each pod is a replica of the run. For 50 steps it computes its own gradients, its own updates, its own
moments and statistics, from its own rows, and sends nothing to other pods. Then all pods exchange how far they have come since the last
exchange, and continue from one point: the mean of their parameters (local SGD), or what Nesterov's momentum makes of the mean change
(DiLoCo). Statistics continue from their mean.

Both are programs of their own. So the program of a step has no collective over the axis, for everybody to see in `jgt plan`, and the host
decides when the other one runs. A state has a dim of replicas, [R, ...], for parameters, moments, statistics, an average of the
parameters and the window of losses. The parameters of the last exchange, the anchor, are whole: evaluations, samples and other runs use
them, since the replicas differ in the middle of a phase.
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
from .fragments import Fragment

OF_REPLICAS = ("params", "opt_state", "losses", "variables", "average")
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
        return _mapped(self._for_all, state)

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

    def exchanged(self, state: State, shardings: Any, fragment: Fragment, *, takes: bool = True) -> State:
        """The state after the exchange of a fragment: all replicas have the new anchor as their parameters. shardings: of the anchor.

        Without `takes` only the anchor is new, and the replicas take it over later (`taken`).
        """
        outer = self.config.outer
        old, params = fragment.cut(state.anchor), fragment.cut(state.params, lead=1)
        change = [(a[None] - p).astype(jnp.float32) for a, p in zip(old, params, strict=True)]
        sums, _ = exchange(change, self.replicas, fragment.of_shardings(shardings), self.config.wire)
        mean = [x / self.replicas.count for x in sums]
        if outer is not None:
            momentum = [outer.momentum * m + g for m, g in zip(fragment.cut(state.momentum), mean, strict=True)]
            state = state._replace(momentum=fragment.pasted(state.momentum, momentum))
            # Nesterov: with the momentum as the next step would have it.
            mean = [outer.lr * (g + outer.momentum * m) for m, g in zip(momentum, mean, strict=True)]
        new = [(a - g).astype(a.dtype) for a, g in zip(old, mean, strict=True)]
        state = state._replace(anchor=fragment.pasted(state.anchor, new), variables=jax.tree.map(self._mean_for_all, state.variables))
        return self._with_params(state, fragment, [self._for_all(a) for a in new]) if takes else state

    def taken(self, state: State, fragment: Fragment) -> State:
        """The state after all replicas have taken over the anchor of a fragment that was exchanged some steps before."""
        kept = self.config.kept
        pairs = zip(fragment.cut(state.params, lead=1), fragment.cut(state.anchor), strict=True)
        blended = [(kept * p.astype(jnp.float32) + (1 - kept) * a[None].astype(jnp.float32)).astype(p.dtype) for p, a in pairs]
        return self._with_params(state, fragment, blended)

    def _mean_for_all(self, x: jax.Array) -> jax.Array:
        """Statistics of all replicas. Counts and random keys remain."""
        return self._for_all(mean_of_replicas(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def _for_all(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (self.replicas.count, *x.shape))

    def _with_params(self, state: State, fragment: Fragment, parts: list[jax.Array]) -> State:
        return state._replace(params=fragment.pasted(state.params, parts, lead=1))


def mean_of_replicas(x: jax.Array) -> jax.Array:
    """One value, [...], of those of all replicas, [R, ...]: their mean, or the first of counts and random keys."""
    return jnp.mean(x, axis=0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


def _mapped(fn: Callable[[Any], Any], state: State) -> State:
    return state._replace(**{name: jax.tree.map(fn, getattr(state, name)) for name in OF_REPLICAS})


_AXES = State(*(0 if name in OF_REPLICAS else None for name in State._fields))
"""For jax.vmap: which parts of a state have a dim of replicas."""


def _only_params(params: Any) -> State:
    return State((), params, ())
