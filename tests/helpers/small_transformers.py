"""Small transformers as their authors would write them, in linen and nnx: only the lines with `context` are ours."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jgt.signal import context

VOCAB, SEQ, EMBED, HEADS, FFN, LAYERS = 32, 8, 16, 2, 32, 2


class Attention(nn.Module):
    @nn.compact
    def __call__(self, h):
        with context("attn"):
            split = lambda x: x.reshape(*x.shape[:2], HEADS, -1)  # noqa: E731
            q, k, v = (split(nn.Dense(EMBED, use_bias=False, name=name)(h)) for name in ("q_proj", "k_proj", "v_proj"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
            scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool))[None, None], scores, -1e9)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
            return nn.Dense(EMBED, use_bias=False, name="out")(mixed)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, h):
        with context("mlp"):
            return nn.Dense(EMBED, name="down")(nn.gelu(nn.Dense(FFN, name="up")(h)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, h, _=None):
        h = h + Attention(name="attn")(nn.LayerNorm(name="norm1")(h))
        return h + Mlp(name="mlp")(nn.LayerNorm(name="norm2")(h)), None


class Transformer(nn.Module):
    scan: bool = True
    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, EMBED, name="embed")
        with context("embed"):
            h = embed(tokens)
        with context("layers"):
            if self.scan:
                layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
                h, _ = layers(name="layers")(h, None)
            else:
                for n in range(LAYERS):
                    h, _ = Block(name=f"layer_{n}")(h)
        with context("head"):
            return embed.attend(h) if self.tied else nn.Dense(VOCAB, use_bias=False, name="unembed")(h)


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        for name in ("q_proj", "k_proj", "v_proj", "out"):
            setattr(self, name, nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs))

    def __call__(self, h):
        with context("attn"):
            q, k, v = (proj(h).reshape(*h.shape[:2], HEADS, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
            scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool))[None, None], scores, -1e9)
            return self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape))


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(EMBED, FFN, rngs=rngs), nnx.Linear(FFN, EMBED, rngs=rngs)

    def __call__(self, h):
        with context("mlp"):
            return self.down(nnx.gelu(self.up(h)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs), nnx.LayerNorm(EMBED, rngs=rngs)
        self.attn, self.mlp = NnxAttention(rngs), NnxMlp(rngs)

    def __call__(self, h):
        h = h + self.attn(self.norm1(h))
        return h + self.mlp(self.norm2(h))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs, layers=LAYERS):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.unembed = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        with context("embed"):
            h = self.embed(tokens)
        with context("layers"):
            for block in self.blocks:
                h = block(h)
        with context("head"):
            return self.unembed(h)


RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {
        "embed": {"params": {"embedding": ["tensor", "fsdp"]}, "out": ["batch", None, None]},
        "layers/attn": {
            "params": {"*_proj/kernel": ["fsdp", "tensor"], "out/kernel": ["tensor", "fsdp"]},
            "out": ["batch", None, None],
            "backward": {"out": ["batch", "tensor", None]},
        },
        "layers/mlp": {"params": {"up/kernel": ["fsdp", "tensor"], "down/kernel": ["tensor", "fsdp"]}, "out": ["batch", None, None]},
        "head": {"params": {"unembed/kernel": ["fsdp", "tensor"]}, "out": ["batch", None, "tensor"]},
    },
    "default": "replicate",
}
"""One set of rules for all of them."""


def cross_entropy(logits, tokens):
    """Mean loss of the next token."""
    losses = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(losses, tokens[:, 1:, None], -1))
