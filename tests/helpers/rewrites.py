"""A small program under a signal, with the rules and the mesh of the tests that rewrite it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from programs import derivatives

import jgt
from jgt.signal import context

U = P.UNCONSTRAINED
MESH = jgt.make_mesh({"data": 4, "tensor": 2})
W = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
X = np.cos(np.arange(32, dtype=np.float32)).reshape(4, 8)


def out_rules(signal="block", spec=("data", "tensor"), **more):
    return jgt.make_rules({"signals": {signal: {"out": list(spec), **more}}, "default": "replicate"})


def block(h, w):
    with context("block"):
        return jnp.tanh(h @ w)


def plain(w, x):
    return block(block(x, w) * 2, w)


def scan(w, x):
    return jax.lax.scan(lambda h, _: (block(h, w), None), x, None, length=3)[0]


def name_of(fn):
    return fn.__name__


@functools.cache
def unsharded(model):
    return derivatives(model, W, X)
