"""An optimizer whose moments are kept in fewer bits than it computes with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def kept_as(optimizer: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """The optimizer with its moments rounded to `dtype`, to the nearest, after each update, which is computed in f32.

    Moments are floating arrays of the state that are shaped like a parameter.
    """

    def init(params: Any) -> Any:
        return _cast(optimizer.init(params), params, dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, _cast(state, params, jnp.float32), params)
        return updates, _cast(state, params, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: Any, params: Any, dtype: Any) -> Any:
    shapes = {x.shape for x in jax.tree.leaves(params)}

    def cast(x: Any) -> Any:
        return x.astype(dtype) if x.shape in shapes and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, state)
