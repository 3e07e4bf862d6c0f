"""A llama as strangers write it, in nnx and in linen: plain Flax with the signals and names of parameters that shipped rules use.

Neither knows devices, groups or recompute. Both compute what `train.models` computes with the same sizes.
b batch, s seq, n heads, h head size, d embed, f ffn, v vocab.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jgt.signal import context, tensor


def rotary(x, theta=10_000.0):
    """Rotary positions on [b, s, n, h]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q, k, v):
    """Causal attention of [b, s, n, h], whose softmax is in f32."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(v.dtype), v)


def attended(x, project, out, num_heads):
    """The attention of a normed x [b, s, d]. project(x, name), out(x): the projections."""
    x = tensor(x, "operand")
    q, k, v = (project(x, name).reshape(*x.shape[:2], num_heads, -1) for name in ("q_proj", "k_proj", "v_proj"))
    q, k, v = tensor(rotary(q), "q"), tensor(rotary(k), "k"), tensor(v, "v")
    heads = tensor(attention(q, k, v), "heads")
    return tensor(out(heads.reshape(*x.shape[:2], -1)), "out")


def logits_of(x, table):
    """The logits [b, s, v] in f32 of normed features [b, s, d]."""
    x = tensor(tensor(x, "normed"), "operand")
    return tensor(jnp.einsum("bsd,vd->bsv", x, tensor(table, "table"), preferred_element_type=jnp.float32), "logits")


# -- nnx ---------------------------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    def __init__(self, config, dtype, rngs):
        dense = functools.partial(nnx.Linear, config.embed, config.embed, use_bias=False, dtype=dtype, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj, self.out = dense(), dense(), dense(), dense()
        self.num_heads = config.heads

    def __call__(self, x):
        return attended(x, lambda x, name: getattr(self, name)(x), self.out, self.num_heads)


class MLP(nnx.Module):
    def __init__(self, config, dtype, rngs):
        dense = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate_proj, self.up_proj = dense(config.embed, config.ffn), dense(config.embed, config.ffn)
        self.down = dense(config.ffn, config.embed)

    def __call__(self, x):
        x = tensor(x, "operand")
        gate, up = tensor(self.gate_proj(x), "gate"), tensor(self.up_proj(x), "up")
        return self.down(tensor(nnx.silu(gate) * up, "hidden"))


class Block(nnx.Module):
    def __init__(self, config, dtype, rngs):
        norm = functools.partial(nnx.RMSNorm, config.embed, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.attn_norm, self.attn = norm(), Attention(config, dtype, rngs)
        self.mlp_norm, self.mlp = norm(), MLP(config, dtype, rngs)

    def __call__(self, x):
        with context("attn"):
            x = x + self.attn(tensor(self.attn_norm(x), "normed"))
        with context("mlp"):
            return x + self.mlp(tensor(self.mlp_norm(x), "normed"))


class NnxLlama(nnx.Module):
    def __init__(self, config, dtype, *, rngs):
        self.embed = nnx.Embed(config.vocab, config.embed, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: Block(config, dtype, rngs))(rngs.split(config.layers))
        self.norm = nnx.RMSNorm(config.embed, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (config.vocab, config.embed)))
        self.dtype = dtype

    def __call__(self, tokens):
        with context("embed"):
            table = tensor(self.embed.embedding[...].astype(self.dtype), "table")
            x = tensor(tensor(jnp.take(table, tokens, axis=0), "rows"), "stream")
        with context("layers"):
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        with context("head"):
            return logits_of(self.norm(x), self.unembedding[...].astype(self.dtype))


# -- linen -------------------------------------------------------------------------------------------------------------


class LinenAttention(nn.Module):
    config: object
    dtype: object

    @nn.compact
    def __call__(self, x):
        def project(x, name):
            return nn.Dense(self.config.embed, use_bias=False, dtype=self.dtype, name=name)(x)

        return attended(x, project, lambda x: project(x, "out"), self.config.heads)


class LinenMLP(nn.Module):
    config: object
    dtype: object

    @nn.compact
    def __call__(self, x):
        x = tensor(x, "operand")
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        gate = tensor(dense(self.config.ffn, name="gate_proj")(x), "gate")
        up = tensor(dense(self.config.ffn, name="up_proj")(x), "up")
        return dense(self.config.embed, name="down")(tensor(nn.silu(gate) * up, "hidden"))


class LinenBlock(nn.Module):
    config: object
    dtype: object

    @nn.compact
    def __call__(self, x, _):
        with context("attn"):
            y = nn.RMSNorm(epsilon=1e-5, dtype=self.dtype, name="attn_norm")(x)
            x = x + LinenAttention(self.config, self.dtype, name="attn")(tensor(y, "normed"))
        with context("mlp"):
            y = nn.RMSNorm(epsilon=1e-5, dtype=self.dtype, name="mlp_norm")(x)
            return x + LinenMLP(self.config, self.dtype, name="mlp")(tensor(y, "normed")), None


class LinenLlama(nn.Module):
    config: object
    dtype: object

    @nn.compact
    def __call__(self, tokens):
        shape = (self.config.vocab, self.config.embed)
        with context("embed"):
            table = tensor(self.param("embedding", nn.initializers.normal(1.0), shape).astype(self.dtype), "table")
            x = tensor(tensor(table[tokens], "rows"), "stream")
        with context("layers"):
            layers = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.config.layers)
            x, _ = layers(self.config, self.dtype, name="layers")(x, None)
        with context("head"):
            table = self.param("unembedding", nn.initializers.normal(0.02), shape).astype(self.dtype)
            return logits_of(nn.RMSNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x), table)
