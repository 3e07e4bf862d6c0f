"""Functions mapped over replicas: the same values, rows that stay where they are, and nothing sent between replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import axes_of, collectives
from jax.sharding import NamedSharding, PartitionSpec

import jgt
from jgt.planner.hlo.text import Module
from jgt.replacements.replicas import Replicas

SIZES = {"pod": 2, "data": 2, "fsdp": 2}
W = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


def replicas(axes=("pod",), batch=("pod", "data", "fsdp")):
    return Replicas(mesh=jgt.make_mesh(SIZES), axes=axes, batch=batch)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize(
    ("axes", "batch"),
    [
        (("pod",), ("pod", "data", "fsdp")),
        (("pod", "data"), ("pod", "data", "fsdp")),
        (("data",), ("pod", "data")),
        (("fsdp",), ("data", "fsdp")),
    ],
)
def test_replicas_have_the_rows_of_their_devices(axes, batch):
    one = replicas(axes, batch)
    x = jax.device_put(X, NamedSharding(one.mesh, PartitionSpec(batch)))
    others = tuple(axis for axis in batch if axis not in axes)
    there = NamedSharding(one.mesh, PartitionSpec(axes, others or None))
    split = jax.jit(one.rows, out_shardings=there).lower(x).compile()
    assert collectives(Module.parse(split.as_text()), in_loops=True) == collectives(Module.parse(split.as_text()), in_loops=False) == []
    rows = split(x)
    assert rows.shape == (one.count, 16 // one.count, 4)
    held = {shard.device: np.asarray(shard.data).reshape(-1, 4) for shard in x.addressable_shards}
    assert all(np.array_equal(held[shard.device], np.asarray(shard.data).reshape(-1, 4)) for shard in rows.addressable_shards)


def test_gradients_of_replicas_add_up_to_the_gradient_and_cross_the_axis_once():
    one = replicas()
    rules = {"axes": {"batch": ["pod", "data"]}, "params": {"*": ["fsdp", None]}, "inputs": ["batch", "..."], "default": "replicate"}
    sharded = jgt.shard(lambda params, x: loss(params["w"], x), rules, one.mesh)
    params = jax.device_put({"w": W}, NamedSharding(one.mesh, PartitionSpec("fsdp")))
    x = jax.device_put(X, NamedSharding(one.mesh, PartitionSpec(("pod", "data"))))

    def apart(params, x):
        return one.map(jax.grad(sharded), (None, 0))(params, one.rows(x))

    lifted = {"w": one.lift(NamedSharding(one.mesh, PartitionSpec("fsdp")))}
    silent = jax.jit(apart, out_shardings=lifted).lower(params, x).compile()
    module = Module.parse(silent.as_text())
    assert not any("pod" in axes_of(c, SIZES) for c in [*collectives(module, in_loops=False), *collectives(module, in_loops=True)])
    gradients = silent(params, x)["w"]
    expected = jax.grad(loss)(W, X)
    np.testing.assert_allclose(jnp.sum(gradients, 0), expected, rtol=0, atol=1e-5)
    summed = jax.jit(lambda g: one.add_up(g, jnp.float32))(gradients)
    np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-5)


def test_a_sum_travels_in_the_type_that_was_asked_for():
    one = replicas()
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32, sharding=NamedSharding(one.mesh, PartitionSpec("pod")))
    made = jax.jit(lambda x: one.add_up(x, jnp.bfloat16), out_shardings=NamedSharding(one.mesh, PartitionSpec()))
    assert made.lower(x).out_info.dtype == jnp.bfloat16


@pytest.mark.parametrize(("axes", "batch"), [((), ("pod",)), (("data",), ("pod",)), (("pod",), ("pod", "stage"))])
def test_axes_that_do_not_split_the_batch_are_refused(axes, batch):
    with pytest.raises(ValueError, match="replicas along"):
        replicas(axes, batch)
