"""A small language model, to edit or to replace.

Nothing here says how it is sharded. `signal.context` names a region and `signal.tensor` an array; rules.yaml says what happens there.

Shapes: b batch, s sequence, d width, h heads, k size of a head, v vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

HEAD_SIZE = 32


class Block(nnx.Module):
    """A layer, [b, s, d] → [b, s, d]: causal attention and an MLP, each of which adds to its input."""

    def __init__(self, width: int, dtype, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.attn_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj, self.out = (linear(width, width) for _ in range(4))
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        with signal.context("attn"):
            x = x + self.attention(self.attn_norm(x))
        with signal.context("mlp"):
            return x + self.down(signal.tensor(jax.nn.gelu(self.up(self.mlp_norm(x))), "hidden"))

    def attention(self, x: jax.Array) -> jax.Array:
        # [b, s, d] → [b, s, h, k]
        q, k, v = (project(x).reshape(*x.shape[:2], -1, HEAD_SIZE) for project in (self.q_proj, self.k_proj, self.v_proj))
        heads = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(signal.tensor(heads, "heads").reshape(x.shape))


def rotated(x: jax.Array) -> jax.Array:
    """Heads [b, s, h, k] with rotary positions (arXiv 2104.09864)."""
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(0, 1, 2 / HEAD_SIZE))[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Model(nnx.Module):
    """Tokens [b, s] → logits [b, s, v]. The arguments are the keys of `model:` in run.yaml; the trainer adds vocab, dtype and rngs.

    width: of the residual stream, a multiple of 32. depth: the number of layers.
    """

    def __init__(self, *, vocab: int, width: int, depth: int, dtype, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        # One Block whose parameters have a leading dim of `depth`: a scan over it compiles one layer, and can be pipelined.
        self.layers = nnx.vmap(lambda rngs: Block(width, dtype, rngs=rngs), in_axes=0, out_axes=0)(rngs.split(depth))
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with signal.context("embed"):
            x = self.embed(tokens)
        with signal.context("layers"):
            graph, stacked = nnx.split(self.layers)
            x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, stacked)
        with signal.context("head"):
            return signal.tensor(self.head(self.norm(x)), "logits")
