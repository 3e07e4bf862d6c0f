"""The state of a run, which a step takes and returns and a checkpoint stores.

It has a part for each owner: what training changes, what optional features of a step keep, and what replicas exchange. A feature that is
off has None in its place, which is no array to JAX, so one type serves all runs. Checkpoints know none of these parts: `State.arrays` and
`State.with_parts` have the names on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import optax

Tree = optax.Params
"""Arrays in nested containers; in a tree of shapes or shardings, these."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trained:
    """The arrays that training changes.

    variables: everything but parameters that the model keeps from step to step, such as running statistics and random keys.
    """

    params: Tree
    opt_state: optax.OptState
    variables: Tree = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """The arrays that features of a step keep (`train.step.features`).

    losses: the losses of the last steps for `train.skip_spikes`, f32[window], NaN for steps still to come. average: the moving average of
    the parameters for `train.ema`, in f32.
    """

    losses: jax.Array | None = None
    average: Tree | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exchanged:
    """The arrays that replicas exchange.

    anchor, momentum: the parameters of the last exchange, if `sync.every` is above 1, and the momentum of `sync.outer`. waiting: the
    gradients of each replica that the next step applies, if `sync.late` is 1, [R, ...].
    """

    anchor: Tree | None = None
    momentum: Tree | None = None
    waiting: Tree | None = None


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class State:
    """The arrays that a run goes through its steps with. Also a tree of their shapes or shardings. step: the number of steps so far.

    As a tree it has no parts: the path of a parameter begins with `params`, in a plan as in a checkpoint.
    """

    step: jax.Array
    trained: Trained
    kept: Kept = Kept()
    exchanged: Exchanged = Exchanged()

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """The arrays by their names, as JAX asks for them."""
        return [(jax.tree_util.GetAttrKey(name), part) for name, part in self._by_name().items()], None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Iterable[Any]) -> State:
        """The state that has these arrays, in the order of `tree_flatten_with_keys`."""
        step, *rest = arrays
        return cls(step, Trained(*rest[:3]), Kept(*rest[3:5]), Exchanged(*rest[5:]))

    def _by_name(self) -> dict[str, Any]:
        return {"step": self.step, **vars(self.trained), **vars(self.kept), **vars(self.exchanged)}

    def arrays(self) -> dict[str, Tree]:
        """The parts that contain arrays, by their names in a checkpoint."""
        return {name: part for name, part in self._by_name().items() if jax.tree.leaves(part)}

    def with_parts(self, **parts: Tree | None) -> State:
        """The state with other parts, by their names in a checkpoint."""
        state = replace(self, step=parts.pop("step", self.step))
        for owner in ("trained", "kept", "exchanged"):
            old = getattr(state, owner)
            new = {field.name: parts.pop(field.name) for field in fields(old) if field.name in parts}
            state = replace(state, **{owner: replace(old, **new)})
        assert not parts, f"a state has no {', '.join(parts)}"
        return state
