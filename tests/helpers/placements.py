"""A small program with its rules, and the questions that tests ask of its placement."""

import jax
import jax.numpy as jnp
import pytest
from small_transformers import SEQ

import jgt
from jgt.signal import context

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
ABSTRACT = jgt.abstract_mesh(SIZES)
TOKENS = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def places(fn, rules, *args, mesh=ABSTRACT, **kwargs):
    """The signals and spec of every parameter."""
    placement = jgt.place(fn, jgt.make_rules(rules), mesh, *args, **kwargs)
    return {p.path: (p.signals, p.spec) for p in placement.parameters}


def problems_of(*args, **kwargs):
    with pytest.raises(jgt.InputError) as caught:
        jgt.place(*args, **kwargs)
    return list(caught.value.problems)


def mlp(params, x):
    with context("layers"):

        def layer(h, w):
            with context("mlp"):
                return jnp.tanh(h @ w["up"]) @ w["down"] + w["bias"][None], None

        h, _ = jax.lax.scan(layer, x, params["layers"])
    with context("head"):
        return h @ params["head"]


MLP = {"layers": shapes(up=(3, 8, 16), down=(3, 16, 8), bias=(3, 8)), **shapes(head=(8, 4))}
MLP_X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
MLP_RULES = {
    "axes": {"batch": ["data"]},
    "signals": {
        "layers/mlp": {"params": {"up": ["fsdp", "tensor"], "down": ["tensor", "fsdp"]}, "out": ["batch", None]},
        "head": {"params": {"head": ["fsdp", None]}},
    },
    "default": "replicate",
}
multiply = context("block")(jnp.matmul)
BLOCK_RULES = {"signals": {"block": {"params": {"w": ["fsdp", "tensor"]}}}}
