"""A stack of equal layers, scanned: compile time does not grow with depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Remat = str | tuple[str, ...]


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> Any:
    """`num_layers` modules as one whose parameters have a leading dim [layers, ...]."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(layers: Any, x: jax.Array, remat: Remat) -> jax.Array:
    """Runs stacked layers over x [b, s, d].

    remat: `none` keeps what the backward pass needs, as does `attention`, which is attention's own business; `block` recomputes each
    layer from its input, a tuple of tensor names all but those.
    """
    graphdef, params = nnx.split(layers)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, params)(x), None

    if remat not in ("none", "attention"):
        names = () if isinstance(remat, str) else remat
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(layer, x, params)
    return x
