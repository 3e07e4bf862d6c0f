"""Phases: steps in which groups of devices train for themselves, each followed by an exchange of their parameters.

With `sync: {axis: pod, every: 50}` each pod is a replica of the run. For 50 steps it computes its own gradients, its own updates, its own
moments and statistics, from its own rows, and sends nothing to other pods. Then all pods exchange how far they have come since the last
exchange, and continue from one point: the mean of their parameters (local SGD), or what Nesterov's momentum makes of the mean change
(DiLoCo). Statistics continue from their mean.

The step and the exchange are two programs. So the program of a step has no collective over the axis, as `jgt plan` shows, and the host
decides when the other one runs. A state has a dim of replicas, [R, ...], for parameters, moments, statistics, an average of the
parameters and the window of losses. The parameters of the last exchange, the anchor, are whole: evaluations, samples and other runs use
them, since the replicas differ in the middle of a phase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt import Replicas

from ..state import State, Tree
from ..step import StepFn
from .config import SyncConfig
from .fragments import Fragment, fragments_of

_ZERO = cast(Any, 0)
_AXES = State(cast(Any, None), _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, frozen=cast(Any, None))
"""For jax.vmap: the parts of a state that have a dim of replicas."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The replicas of a run with phases."""

    replicas: Replicas
    config: SyncConfig

    def begin(self, state: State) -> State:
        """A state with phases at an exchange, from one without: all replicas are equal. The momentum is zero if the state has none."""
        params, momentum = state.params, state.momentum
        if self.config.outer is None:
            momentum = None
        elif momentum is None:
            momentum = jax.tree.map(jnp.zeros_like, params)
        return replace(of_replicas(self._for_all, state), anchor=params, momentum=momentum, waiting=None)

    def spread(self, tree: Tree) -> Tree:
        """The arrays of all replicas, [R, ...], from one replica's arrays: all have the same."""
        return jax.tree.map(self._for_all, tree)

    def of_one(self, shapes: State) -> State:
        """The shapes of one replica's state, without phases."""
        return of_replicas(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _alone(shapes))

    def lift(self, shardings: State) -> State:
        """The shardings of a state, from the shardings of one replica's."""
        params = shardings.params
        momentum = None if self.config.outer is None else params
        return replace(of_replicas(self.replicas.lift, shardings), anchor=params, momentum=momentum, waiting=None)

    def convert(self, state: State, convert: Callable[[State], State]) -> State:
        """The state with each replica's part converted, and its anchor and momentum as parameters are."""

        def params(params: Tree | None) -> Tree | None:
            return None if params is None else convert(State(state.step, params, ())).params

        after = self.replicas.map(convert, (_AXES,), _AXES)(_alone(state))
        return replace(after, anchor=params(state.anchor), momentum=params(state.momentum))

    def step(self, step: StepFn) -> StepFn:
        """The step of every replica, on its own rows. Metrics are [R]."""

        def run(state: State, batch: dict[str, jax.Array], settings: jax.Array) -> tuple[State, dict[str, jax.Array]]:
            after, metrics = self.replicas.map(step, (_AXES, 0, None), (_AXES, 0))(_alone(state), self.replicas.rows(batch), settings)
            return replace(after, anchor=state.anchor, momentum=state.momentum, waiting=state.waiting), metrics

        return run

    def exchange(self, state: State, shardings: object, fragment: Fragment) -> State:
        """The state after the exchange of a fragment: all replicas have the new anchor as their parameters. shardings: the anchor's."""
        outer, params, momentum = self.config.outer, state.params, state.momentum
        old, own = fragment.cut(state.anchor), fragment.cut(params, lead=1)
        change = [(a[None] - p).astype(jnp.float32) for a, p in zip(old, own, strict=True)]
        sums = self.replicas.exchange(change, fragment.of_shardings(shardings), self.config.wire)
        mean = [x / self.replicas.count for x in sums]
        if outer is not None:
            moved = [(outer.momentum * m + g).astype(m.dtype) for m, g in zip(fragment.cut(momentum), mean, strict=True)]
            momentum = fragment.paste(momentum, moved)
            # Nesterov: with the momentum as the next step would have it.
            mean = [outer.lr * (g + outer.momentum * m) for m, g in zip(moved, mean, strict=True)]
        new = [(a - g).astype(a.dtype) for a, g in zip(old, mean, strict=True)]
        anchor = fragment.paste(state.anchor, new)
        variables = jax.tree.map(self._mean_for_all, state.variables)
        params = fragment.paste(params, [self._for_all(a) for a in new], lead=1)
        return replace(state, params=params, variables=variables, anchor=anchor, momentum=momentum)

    def _mean_for_all(self, x: jax.Array) -> jax.Array:
        """The mean of all replicas' statistics. Counts and random keys remain."""
        return self._for_all(mean_of_replicas(x)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def _for_all(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (self.replicas.count, *x.shape))


def of_replicas(fn: Callable[..., object], state: State) -> State:
    """The state with `fn` applied to the arrays that each replica has for itself."""
    own = ("params", "opt_state", "variables", "losses", "average")
    return replace(state, **{name: jax.tree.map(fn, getattr(state, name)) for name in own})


def _alone(state: State) -> State:
    """The state without the arrays that replicas exchange."""
    return replace(state, anchor=None, momentum=None, waiting=None)


def mean_of_replicas(x: jax.Array) -> jax.Array:
    """One value, [...], from the values of all replicas, [R, ...]: their mean, or the first of counts and random keys."""
    return jnp.mean(x, axis=0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


def fetch_metrics(metrics: Mapping[str, jax.Array], *, has_replicas: bool) -> dict[str, object]:
    """The metrics of a step on the host, by name: means over the replicas of this process; `applied` if all of them applied the update.

    A mean over all replicas would be a collective over the slow axis, and would make all wait for the slowest in every step.
    """
    if not has_replicas:
        return jax.device_get(dict(metrics))
    values = {name: _local(x) for name, x in metrics.items()}
    return {name: np.all(x) if x.dtype == bool else np.mean(x, axis=0) for name, x in values.items()}


def _local(x: jax.Array) -> np.ndarray:
    """The entries of [R, ...] that this process's devices hold."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


@dataclass(frozen=True, kw_only=True)
class ExchangePrograms:
    """Exchanges of a run with phases, under jax.jit: state → state each, whose buffers are donated. shapes, shardings: the state's."""

    phases: Phases
    shapes: State
    shardings: State

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments in which parameters are exchanged."""
        return self._fragments(self.phases.config.fragments)

    def exchange(self, part: int | None = None) -> jax.stages.Wrapped:
        """The exchange of all parameters, or of one fragment by its number."""
        fragment = self._fragments(1)[0] if part is None else self.fragments[part]
        run = functools.partial(self.phases.exchange, shardings=self.shardings.anchor, fragment=fragment)
        return jax.jit(run, in_shardings=(self.shardings,), out_shardings=self.shardings, donate_argnums=0)

    def compile(self) -> Exchanges:
        """All programs that a run needs."""
        count, whole = self.phases.config.fragments, self._compile(None)
        parts = [whole] if count == 1 else [self._compile(part) for part in range(count)]
        return Exchanges(sync=self.phases.config, whole=whole, parts=tuple(parts))

    def _fragments(self, count: int) -> tuple[Fragment, ...]:
        return fragments_of(self.shapes.anchor, self.shardings.anchor, count)

    def _compile(self, part: int | None) -> jax.stages.Compiled:
        return self.exchange(part).lower(self.shapes).compile()


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The compiled programs, state → state each. whole exchanges all parameters, and each of `parts` one fragment."""

    sync: SyncConfig
    whole: Callable[[State], State]
    parts: tuple[Callable[[State], State], ...]

    def after(self, state: State, step: int, *, is_last: bool) -> tuple[State, bool]:
        """The state after the exchanges that are due after a step, and whether all replicas are equal now.

        is_last: whether the step is the run's last, which ends with a whole exchange.
        """
        if is_last:
            return self.whole(state), True
        due = list(due_fragments(self.sync, step))
        for part in due:
            state = self.parts[part](state)
        return state, bool(due) and len(self.parts) == 1


def due_fragments(sync: SyncConfig, step: int) -> Iterator[int]:
    """The fragments that are exchanged after a step. The last one is exchanged at the end of a phase."""
    for part in range(sync.fragments):
        if step > 0 and (step - sync.every * (part + 1) // sync.fragments) % sync.every == 0:
            yield part
