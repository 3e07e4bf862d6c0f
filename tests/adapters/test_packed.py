"""Packed matrices: each number is the nearest code of its block, and a function of packed matrices is the function of these numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgt import Matrix, Packing

D, L = 64, 3
# Quantiles of a normal distribution, as QLoRA's appendix E has them.
NEGATIVE = [-1, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004]
POSITIVE = [0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1]
CODES = {"nf4": np.array([*NEGATIVE, 0, *POSITIVE], np.float32), "int8": np.arange(-127, 128, dtype=np.float32) / 127}
BYTES = {"nf4": 34 / 64, "int8": 66 / 64}


def values(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("name", CODES)
def test_each_number_is_the_nearest_code(name):
    packing, x = Packing(name), values(3, 5, 192).at[1, 2].set(0)
    packed = packing.pack(x)
    assert packed.dtype == jnp.uint8 and packed.size == x.size * BYTES[name]
    assert packing.packed(x.shape) == packed.shape and packing.unpacked(packed.shape) == x.shape == packing.shape_of(packed)
    blocks = np.asarray(x).reshape(-1, 64)
    scale = np.asarray(jnp.asarray(np.abs(blocks).max(axis=1, keepdims=True)).astype(jnp.bfloat16).astype(jnp.float32))
    distances = np.abs(blocks[:, :, None] - scale[:, :, None] * CODES[name])
    unpacked = np.asarray(packing.unpack(packed)).reshape(-1, 64)
    np.testing.assert_allclose(np.abs(unpacked - blocks), distances.min(axis=-1), atol=1e-6)
    assert np.all(np.asarray(packing.unpack(packed))[1, 2] == 0)


@pytest.mark.parametrize("name", CODES)
@given(data=st.data())
def test_bytes_of_a_shard_are_those_of_its_blocks(name, data):
    packing, x = Packing(name), values(2, 256)
    packed = np.asarray(packing.pack(x))
    first = data.draw(st.integers(0, packed.shape[-1] - 1))
    last = data.draw(st.integers(first + 1, packed.shape[-1]))
    columns, inner = packing.blocks(range(first, last))
    shard = np.asarray(packing.pack(x[:, columns.start : columns.stop]))[:, inner]
    np.testing.assert_array_equal(shard, packed[:, first:last])


def layers(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"].astype(jnp.bfloat16).astype(jnp.float32)) @ w["down"].T, None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, p)[0] ** 2)


def cast_before(p, x):
    stack = p["w"].astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0] ** 2)


def indexed(p, x):
    return jnp.sum(jax.lax.fori_loop(0, L, lambda i, x: jnp.tanh(x @ p["w"][i]), x))


def heads(p, x):
    return jnp.sum(jnp.tanh(jnp.einsum("bd,dnh->bnh", x, p["w"].reshape(D, 4, 16))) ** 2)


def parts(p, x):
    left, right = jnp.split(p["w"], 2, axis=1)
    return jnp.sum(jnp.tanh(x @ left) * (x @ right))


def of_group(p, x):
    return jnp.sum(jax.lax.ragged_dot(x, p["w"], jnp.array([1, 1, 2], jnp.int32)) ** 2)


FUNCTIONS = {
    layers: {"up": (L, D, 128), "down": (L, D, 128)},
    cast_before: {"w": (L, D, D)},
    indexed: {"w": (L, D, D)},
    heads: {"w": (D, 64)},
    parts: {"w": (D, 128)},
    of_group: {"w": (L, D, 128)},
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_function_of_packed_matrices_is_the_function_of_their_numbers(fn, name):
    packing, x = Packing(name), values(4, D, seed=9)
    params = {path: values(*shape) / 8 for path, shape in FUNCTIONS[fn].items()}
    packed = jax.tree.map(packing.pack, params)
    matrices = {m.path: m for m in Matrix.all_of(fn, params, x)}
    assert matrices.keys() == params.keys() and not any(m.problem for m in matrices.values())
    first, *_ = matrices.values()
    a, b = (values(*shape, seed=n) / 4 for n, shape in enumerate(first.factor_shapes(2)))

    def adapted(a, b, x):
        return Matrix.with_updates(fn, {first.path: first.update(a, b, scale=0.7)}, dict.fromkeys(params, packing))(packed, x)

    def plain(a, b, x):
        numbers = jax.tree.map(packing.unpack, packed)
        return Matrix.with_updates(fn, {first.path: first.update(a, b, scale=0.7)})(numbers, x)

    value, gradients = jax.jit(jax.value_and_grad(adapted, argnums=(0, 1, 2)))(a, b, x)
    expected, others = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(a, b, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.max(np.abs(other)))


def test_the_backward_pass_keeps_packed_matrices():
    def fn(p, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0])

    packing = Packing("nf4")
    packed = {"w": packing.pack(values(L, 256, 256))}
    of_packed = Matrix.with_updates(fn, {}, {"w": packing})
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: of_packed(packed, x), x)[1], values(1, 256))
    assert max(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) == packed["w"].size
