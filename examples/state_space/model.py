"""A language model that is a stack of diagonal linear recurrences (as S5, arXiv 2208.04933), computed by an associative scan.

It knows nothing of meshes: `signal.context` names its places, and the rules say what happens there.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal


class StateSpace(nnx.Module):
    """Tokens [b, s] → logits [b, s, vocab]."""

    def __init__(self, *, vocab: int, width: int = 64, states: int = 64, depth: int = 4, dtype=jnp.float32, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: Layer(width, states, dtype, rngs=rngs), in_axes=0, out_axes=0)(rngs.split(depth))
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with signal.context("embed"):
            x = self.embed(tokens)
        graph, params = nnx.split(self.layers)
        with signal.context("layers"):
            x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, params)
        with signal.context("head"):
            return self.head(self.norm(x))


class Layer(nnx.Module):
    """x [b, s, width] → x + out(gate · h), where h_t = decay · h_{t-1} + in(x_t) for each of the states."""

    def __init__(self, width: int, states: int, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.inward = nnx.Linear(width, states, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate = nnx.Linear(width, states, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(states, width, use_bias=False, dtype=dtype, rngs=rngs)
        # Half-lives from two positions to a few hundred.
        self.decay = nnx.Param(jnp.linspace(1.0, 6.0, states))

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = signal.tensor(self.norm(x), "normed")
        with signal.context("recurrence"):
            values = self.inward(normed)
            decay = jax.nn.sigmoid(self.decay[...])[None, None].astype(values.dtype)
            # Each pair (a, b) is the map h → a · h + b; a scan composes them in log(s) steps.
            pairs = jnp.broadcast_to(decay, values.shape), (1 - decay) * values
            _, states = jax.lax.associative_scan(lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), pairs, axis=1)
            return x + self.out(states * jax.nn.silu(self.gate(normed)))
