"""Models without names, in Flax, and the tensor parallelism that a person would write for them: by path, the dim that is split."""

from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

WIDTH, HEADS, HEAD, HIDDEN, VOCAB, SEQ = 256, 4, 64, 1024, 512, 32
KEY = jax.random.key(0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A loss, the shapes of its parameters and of a batch, and the dims that a person would split over `tensor`."""

    init: Any
    loss: Any
    batch: Any
    by_hand: dict = field(default_factory=dict)
    whole: tuple = ()


def tokens(*shape):
    return jax.random.randint(KEY, shape, 0, VOCAB)


class BertLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")(x, mask=mask)
        x = nn.LayerNorm()(x + y)
        y = nn.Dense(WIDTH, name="output")(nn.gelu(nn.Dense(HIDDEN, name="intermediate")(x)))
        return nn.LayerNorm()(x + y)


class Bert(nn.Module):
    @nn.compact
    def __call__(self, ids, segments):
        words = nn.Embed(VOCAB, WIDTH, name="words")
        positions = self.param("positions", nn.initializers.normal(), (1, SEQ, WIDTH))
        x = nn.LayerNorm()(words(ids) + positions + nn.Embed(2, WIDTH, name="segments")(segments))
        mask = (ids > 0)[:, None, None, :]
        for n in range(2):
            x = BertLayer(name=f"layer_{n}")(x, mask)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(WIDTH, name="transform")(x)))
        return words.attend(x) + self.param("bias", nn.initializers.zeros, (VOCAB,))


def bert():
    model, batch = Bert(), {"ids": tokens(16, SEQ), "targets": tokens(16, SEQ)}

    def loss(params, batch):
        logits = model.apply(params, batch["ids"], batch["ids"] % 2)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    by_hand = {"words/embedding": 0, "bias": 0}
    for n in range(2):
        by_hand |= {
            f"layer_{n}/attention/{name}/{leaf}": d for name in ("query", "key", "value") for leaf, d in (("kernel", 1), ("bias", 0))
        }
        by_hand |= {f"layer_{n}/attention/out/kernel": 0, f"layer_{n}/intermediate/kernel": 1, f"layer_{n}/intermediate/bias": 0}
        by_hand |= {f"layer_{n}/output/kernel": 0}
    whole = ("transform/kernel",)
    return Model(
        init=lambda: model.init(KEY, batch["ids"], batch["ids"]), loss=loss, batch=batch, by_hand=under("params", by_hand), whole=whole
    )


def under(prefix, by_hand):
    return {f"{prefix}/{path}": dim for path, dim in by_hand.items()}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (8, 8), strides=8, rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(images.shape[0], -1, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(self.cls[...], (x.shape[0], 1, WIDTH)), x], axis=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def vit():
    batch = {"image": jax.random.normal(KEY, (16, 32, 32, 3)), "label": tokens(16) % 10}

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()

    by_hand = {}
    for n in range(2):
        by_hand |= {
            f"blocks/{n}/attention/{name}/{leaf}": d for name in ("query", "key", "value") for leaf, d in (("kernel", 1), ("bias", 0))
        }
        by_hand |= {
            f"blocks/{n}/attention/out/kernel": 0,
            f"blocks/{n}/up/kernel": 1,
            f"blocks/{n}/up/bias": 0,
            f"blocks/{n}/down/kernel": 0,
        }
    return Model(init=lambda: ViT(nnx.Rngs(0)), loss=loss, batch=batch, by_hand=by_hand)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.02)
        gate = jax.nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        best, choice = jax.lax.top_k(gate, 2)
        weight = jnp.einsum("bsk,bskx->bsx", best, jax.nn.one_hot(choice, 4))
        hidden = jax.nn.silu(jnp.einsum("bse,xef->bsxf", x, self.param("gate", normal, (4, WIDTH, HIDDEN))))
        hidden *= jnp.einsum("bse,xef->bsxf", x, self.param("up", normal, (4, WIDTH, HIDDEN)))
        return jnp.einsum("bsxf,xfe,bsx->bse", hidden, self.param("down", normal, (4, HIDDEN, WIDTH)), weight)


class Mixture(nn.Module):
    """Rotary positions, fewer heads of keys than of queries, and experts; a scan over layers."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(ids)
        layers = nn.scan(MixtureLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.RMSNorm()(x))


class MixtureLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        def dense(heads, name):
            return nn.Dense(heads * HEAD, use_bias=False, name=name)

        y = nn.RMSNorm()(x)
        q, k, v = (dense(n, name)(y).reshape(*x.shape[:2], n, HEAD) for name, n in (("q", 2 * HEADS), ("k", HEADS), ("v", HEADS)))
        q, k = rotated(q), rotated(k)
        k, v = (jnp.repeat(one, 2, axis=2) for one in (k, v))
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(WIDTH, use_bias=False, name="o")(heads.reshape(*x.shape[:2], -1))
        return x + Experts(name="experts")(nn.RMSNorm()(x)), None


def rotated(x):
    angle = jnp.arange(x.shape[1])[None, :, None, None] * 0.1 ** jnp.arange(HEAD // 2)[None, None, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


def mixture():
    model, batch = Mixture(), {"ids": tokens(16, SEQ)}

    def loss(params, batch):
        logits = model.apply(params, batch["ids"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    by_hand = {
        "embed/embedding": 0,
        "head/kernel": 1,
        "layers/q/kernel": 2,
        "layers/k/kernel": 2,
        "layers/v/kernel": 2,
        "layers/o/kernel": 1,
    }
    by_hand |= {"layers/experts/gate": 3, "layers/experts/up": 3, "layers/experts/down": 2}
    return Model(init=lambda: model.init(KEY, batch["ids"]), loss=loss, batch=batch, by_hand=under("params", by_hand))


MODELS = {"bert": bert, "vit": vit, "mixture": mixture}
