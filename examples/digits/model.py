"""A small vision transformer on scikit-learn's handwritten digits: a model, a loss, data and an optimizer of one's own.

BatchNorm keeps statistics from step to step and dropout draws random numbers: both are state of the model, which checkpoints contain.
"""

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from jgt import signal

CLASSES = 10


def digits(split: str, held_out: int = 360):
    """Samples {"image": [8, 8, 1], "label": []} of 1,797 scans."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[:held_out] if split == "eval" else order[held_out:]
    images = (images[chosen] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return [{"image": image, "label": np.int32(label)} for image, label in zip(images, labels[chosen], strict=True)]


class Vision(nnx.Module):
    """Images [b, 8, 8, 1] → logits [b, 10]."""

    def __init__(self, *, width: int = 64, depth: int = 4, heads: int = 4, dropout: float = 0.1, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, width, kernel_size=(2, 2), strides=(2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, width)))
        self.layers = nnx.List([Layer(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        with signal.context("embed"):
            x = self.norm(self.patches(images))
            x = x.reshape(len(x), -1, x.shape[-1]) + self.positions[...][None]
        with signal.context("layers"):
            for layer in self.layers:
                x = layer(x)
        with signal.context("head"):
            return self.head(x.mean(axis=1))


class Layer(nnx.Module):
    """x [b, s, width] → [b, s, width]."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.attn_norm, self.mlp_norm = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with signal.context("attn"):
            x = x + self.dropout(self.attn(self.attn_norm(x)))
        with signal.context("mlp"):
            return x + self.dropout(self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))))


def loss(model, batch):
    """The mean cross entropy, and the share of images that are recognised."""
    logits = model(batch["image"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return nats.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def lamb(learning_rate, weight_decay=0.0):
    return optax.lamb(learning_rate, weight_decay=weight_decay)
