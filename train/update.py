"""Applies an optimizer's update, or leaves all as it was: to all parameters at once, or to one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgt.placement import Placement, path_text

Update = Callable[[optax.GradientTransformation, Any, Any, Any, jax.Array], tuple[Any, Any]]
"""update(optimizer, gradients, params, opt_state, applied) → params and opt_state, as they were unless applied (a bool)."""


def update_all(optimizer: optax.GradientTransformation, gradients: Any, params: Any, opt_state: Any, applied: jax.Array) -> tuple[Any, Any]:
    """The update of all parameters."""
    updates, state = optimizer.update(gradients, opt_state, params)
    new, old = (optax.apply_updates(params, updates), state), (params, opt_state)
    return jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)


def update_in_turn(placement: Placement) -> Update:
    """The update of one parameter after another, whose moments come from the host's memory and go back there.

    The optimizer treats each parameter by itself. A parameter's moments wait until those before them are back, or XLA would
    bring all at once. The largest come last, when the gradients of the others are gone.
    """

    def update(optimizer: optax.GradientTransformation, gradients: Any, params: Any, opt_state: Any, applied: jax.Array) -> tuple[Any, Any]:
        named, tree = jax.tree.flatten_with_path(params)
        gradient_leaves = jax.tree.leaves(gradients)
        # Where a part of an optimizer does without a parameter, it says so in the parameter's place.
        state, state_tree = jax.tree.flatten_with_path(opt_state, is_leaf=_is_masked)
        owners = [_owner(placement, path_text(path), x) for path, x in state]
        old = [x for _, x in state]
        new, new_params, home = list(old), [x for _, x in named], []
        for i in sorted(range(len(named)), key=lambda i: named[i][1].size):
            path, parameter = named[i]
            own = [j for j, owner in enumerate(owners) if owner == path_text(path)]
            moments = [j for j in own if not _is_masked(old[j])]
            waiting, _ = jax.lax.optimization_barrier(([old[j] for j in moments], home))
            here = dict(zip(moments, jax.device_put(waiting, jax.memory.Space.Device), strict=True))
            # What is shared, such as counts, each parameter's update takes and makes anew.
            seen = [j for j, owner in enumerate(owners) if owner is None or j in own]
            given = jax.tree.unflatten(state_tree, [here.get(j, x) if j in seen else None for j, x in enumerate(old)])
            params_after, state_after = update_all(
                optimizer, _only(tree, i, gradient_leaves[i]), _only(tree, i, parameter), given, applied
            )
            (new_params[i],) = jax.tree.leaves(params_after)
            after = dict(zip(seen, jax.tree.leaves(state_after, is_leaf=_is_masked), strict=True))
            home = jax.device_put([after[j] for j in moments], jax.memory.Space.Host)
            after |= zip(moments, home, strict=True)
            new = [after.get(j, x) for j, x in enumerate(new)]
        return jax.tree.unflatten(tree, new_params), jax.tree.unflatten(state_tree, new)

    return update


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _owner(placement: Placement, path: str, x: Any) -> str | None:
    place = placement.owner(path, None if _is_masked(x) else x.shape)
    return None if place is None else place.path


def _only(tree: Any, index: int, leaf: jax.Array) -> Any:
    """A tree with one of its leaves, and None instead of the others."""
    return jax.tree.unflatten(tree, [leaf if i == index else None for i in range(tree.num_leaves)])
