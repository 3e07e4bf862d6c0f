"""A mixture of experts, as a model calls it and as every expert on every row."""

import jax
import jax.numpy as jnp

from jgt import signal


def make(key, count, embed, ffn, layers=None):
    """Parameters of a mixture, or of a stack of them. `bias` is added to the scores for the choice."""
    if layers is not None:
        return jax.vmap(lambda key: make(key, count, embed, ffn))(jax.random.split(key, layers))
    gate, up, down, router = jax.random.split(key, 4)
    return {
        "router": 0.3 * jax.random.normal(router, (embed, count)),
        "gate": jax.random.normal(gate, (count, embed, ffn)) * embed**-0.5,
        "up": jax.random.normal(up, (count, embed, ffn)) * embed**-0.5,
        "down": jax.random.normal(down, (count, ffn, embed)) * ffn**-0.5,
    }


def route(params, x, choose, bias):
    """The choice and the scale of each row [..., choose]."""
    scores = jax.nn.softmax(x @ params["router"])
    _, choice = jax.lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), choose)
    return choice, jnp.take_along_axis(scores, choice, axis=-1)


def ffn(rows, sizes, weights):
    gate, up = (jax.lax.ragged_dot(rows, weights[name], sizes) for name in ("gate", "up"))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, weights["down"], sizes)


def mixed(params, x, choose, bias):
    """x [..., embed] through the experts chosen for each row."""
    with signal.context("moe"):
        return signal.experts(ffn, {name: params[name] for name in ("gate", "up", "down")}, x, *route(params, x, choose, bias))


def every_expert(params, x, choose, bias):
    """The same by every expert on every row."""
    return every_expert_of(params, x, *route(params, x, choose, bias))


def every_expert_of(params, x, choice, scale):
    """`signal.experts` by every expert on every row."""
    weight = jnp.sum(jax.nn.one_hot(choice, params["up"].shape[0]) * scale[..., None], -2)
    hidden = jax.nn.silu(jnp.einsum("...d,edf->...ef", x, params["gate"])) * jnp.einsum("...d,edf->...ef", x, params["up"])
    return jnp.einsum("...ef,efd,...e->...d", hidden, params["down"], weight)


def loss_of(layer, choose, bias=0.0):
    """A loss of parameters of one mixture."""
    return lambda params, x: jnp.mean(jnp.sin(layer(params, x, choose, bias)))


def rules_of(mesh, **experts):
    """Rules for a mixture on a mesh of these axes."""
    fsdp, tensor = ("fsdp" if "fsdp" in mesh else None), ("tensor" if "tensor" in mesh else None)
    params = {"{gate,up}": ["expert", fsdp, tensor], "down": ["expert", tensor, fsdp], "router": []}
    return {
        "axes": {"batch": [axis for axis in mesh if axis not in ("tensor", "stage")]},
        "signals": {"**/moe": {"params": params, "experts": {"axis": "expert", **experts}}},
        "default": "replicate",
    }


def worst(found, wanted):
    """The largest difference of any array, over the largest number in that array."""

    def one(a, b):
        return float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30))

    return max(map(one, jax.tree.leaves(found), jax.tree.leaves(wanted)))
