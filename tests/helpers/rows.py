"""Losses of each row of a batch, and the check whether a pipeline takes them."""

import jax
import jax.numpy as jnp
from models import embed, logits_of, mesh_of, mlp, nats, run_layers

from jgt.signal import context

SIZES = {"stage": 2, "data": 2}


def rows_of(params, batch, layer=mlp):
    """The loss of each row [b]."""
    return jnp.mean(nats(logits_of(params, run_layers(params, embed(params, batch), layer)), batch), axis=-1)


def length_of(batch):
    return jnp.sum(batch["weights"], axis=-1)


def load_balance(x):
    """Switch (arXiv 2101.03961), section 2.2: a product of two means over the batch."""
    gates = jax.nn.softmax(x)
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1])
    return jnp.sum(jnp.mean(gates, axis=(0, 1)) * jnp.mean(chosen, axis=(0, 1)))


def with_a_loss_of_each_layer(layer, params, batch):
    """The loss, plus the mean of the second result of each layer."""
    x = embed(params, batch)
    with context("layers"):
        x, balance = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(nats(logits_of(params, x), batch)) + jnp.mean(balance)


def shapes(meeting, **options):
    """The shape of the result of a pipelined case, which is traced; a case that is refused raises the error."""
    return jax.eval_shape(meeting.pipelined(mesh_of(**SIZES), **options), meeting.params, *meeting.inputs)
