"""The facts that a layer needs beside the activations of its tokens: where they are in their texts, and which options the layer has."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Where the tokens [b, s] are in their texts.

    segments: int[b, s], the position in its row at which the document of each token begins, which is negative where the first tokens are in
    a cache; None if each row is one document. lengths: int[b], the tokens of each row's text so far; None: s. positions: int[b, s], the
    position of each token in its row; None: they are in order.
    """

    segments: jax.Array | None = None
    lengths: jax.Array | None = None
    positions: jax.Array | None = None

    def in_documents(self, seq: int) -> jax.Array | None:
        """The position of each token in its document, int[b, s]; None if they are 0 to s - 1 in each row."""
        if self.segments is None:
            return self.positions
        return (jnp.arange(seq)[None, :] if self.positions is None else self.positions) - self.segments


class LayerFlags(NamedTuple):
    """The values that may differ between layers. A flag that differs is an array with an entry for each layer, which the scan takes apart.

    is_full: whether a token sees all earlier ones, whatever `model.window` says. rotates: whether queries and keys have rotary positions.
    place: the layer's place among those of its kind in a cache, int32[]; False without a cache.
    """

    is_full: bool | jax.Array = True
    rotates: bool | jax.Array = True
    place: bool | jax.Array = False
