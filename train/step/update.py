"""Applies an optimizer's update to all parameters at once, or to one after another while their moments live in the host's memory.

AdamW's two moments take twice the memory of the parameters, and are used for a few milliseconds of each step. With
`optimizer.offload: host` they stay in the host's memory in between. All of them together would need the memory that offloading saves, so
the parameters are updated in turn, and moments go back before the next ones come. The numbers are bit-equal to an update of all at once,
because an optimizer's update of one parameter does not read the others; clipping does, and happens before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgt import Storage, path_text

from .state import Tree

Update = Callable[[optax.GradientTransformation, Tree, Tree, optax.OptState, jax.Array], tuple[Tree, optax.OptState]]
"""update(optimizer, gradients, params, opt_state, applied) → params and opt_state; the old ones if `applied`, a bool[], is false."""


def update_all(
    optimizer: optax.GradientTransformation, gradients: Tree, params: Tree, opt_state: optax.OptState, applied: jax.Array
) -> tuple[Tree, optax.OptState]:
    """An update of all parameters at once."""
    updates, state = optimizer.update(gradients, opt_state, params)
    new, old = (optax.apply_updates(params, updates), state), (params, opt_state)
    return jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)


def update_in_turn(storage: Storage) -> Update:
    """An update of one parameter after another. Moments come from the host's memory and return there."""

    def update(
        optimizer: optax.GradientTransformation, gradients: Tree, params: Tree, opt_state: optax.OptState, applied: jax.Array
    ) -> tuple[Tree, optax.OptState]:
        named, tree = jax.tree.flatten_with_path(params)
        gradient_leaves = jax.tree.leaves(gradients)
        # A masked part of an optimizer has an empty MaskedNode in a parameter's place. As a leaf it has an owner, too.
        state, state_tree = jax.tree.flatten_with_path(opt_state, is_leaf=_is_masked)
        owners = [_owner(storage, path_text(path), x) for path, x in state]
        old = [x for _, x in state]
        new, new_params, at_home = list(old), [x for _, x in named], []
        # Small parameters first: the largest moments arrive last, when the memory of all other gradients is free.
        for i in sorted(range(len(named)), key=lambda i: named[i][1].size):
            path, parameter = named[i]
            owned = [j for j, owner in enumerate(owners) if owner == path_text(path)]
            moments = [j for j in owned if not _is_masked(old[j])]
            # The barrier makes these moments depend on the return of the ones before. Otherwise XLA would transfer all at once.
            waiting, _ = jax.lax.optimization_barrier(([old[j] for j in moments], at_home))
            on_device = dict(zip(moments, jax.device_put(waiting, jax.memory.Space.Device), strict=True))
            # Leaves without an owner, such as counts, are shared. Each turn computes the same new value from the old one.
            visible = [j for j, owner in enumerate(owners) if owner is None or j in owned]
            state_before = jax.tree.unflatten(state_tree, [on_device.get(j, x) if j in visible else None for j, x in enumerate(old)])
            gradient, param = _only(tree, i, gradient_leaves[i]), _only(tree, i, parameter)
            params_after, state_after = update_all(optimizer, gradient, param, state_before, applied)
            (new_params[i],) = jax.tree.leaves(params_after)
            after = dict(zip(visible, jax.tree.leaves(state_after, is_leaf=_is_masked), strict=True))
            at_home = jax.device_put([after[j] for j in moments], jax.memory.Space.Host)
            after |= zip(moments, at_home, strict=True)
            new = [after.get(j, x) for j, x in enumerate(new)]
        return jax.tree.unflatten(tree, new_params), jax.tree.unflatten(state_tree, new)

    return update


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)


def _owner(storage: Storage, path: str, x: Any) -> str | None:
    """The path of the parameter that a leaf of the optimizer's state belongs to."""
    place = storage.model.owner(path, None if _is_masked(x) else x.shape)
    return None if place is None else place.path


def _only(tree: Any, index: int, leaf: jax.Array) -> Tree:
    """A tree with one leaf, and None, which is not a leaf to JAX, in place of the others."""
    return jax.tree.unflatten(tree, [leaf if i == index else None for i in range(tree.num_leaves)])
