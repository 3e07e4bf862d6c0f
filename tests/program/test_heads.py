"""cuDNN's attention inside a shard_map that leaves axes to the partitioner, with a slow body in the place of the kernel, on CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jgt
from jgt.program.heads import split_heads_in_stages

SHAPES = []
"""The shapes of q and k that the kernel saw."""


def by_hand(q, k, v, bias):
    """Causal attention [b, s, n, h] with k key/value heads, in f32."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    scores = scores + (bias if bias.ndim == 4 else 0)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, -1e30)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnqk,bknh->bqnh", jnp.exp(scores - lse[..., None]).astype(q.dtype), v)
    return out, lse


def forward(q, k, v, bias, *_, is_training, **__):
    SHAPES.append((q.shape, k.shape))
    out, lse = by_hand(q, k, v, bias)
    return [out, lse] if is_training else [out]


def backward(q, k, v, bias, *rest, variadic_args, **_):
    SHAPES.append((q.shape, k.shape))
    with_bias = (3,) if variadic_args[1] else ()
    _, pull = jax.vjp(lambda *x: by_hand(*x)[0], q, k, v, bias)
    gradients = pull(rest[8])
    return [gradients[i] for i in (0, 1, 2, *with_bias)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """The kernel has a body on CPU, and JAX asks no library whether it is there."""
    for name, body in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(body, multiple_results=True), platform="cpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: False, raising=False)
    for name in ("check_is_flash_attention", "check_layout"):
        monkeypatch.setattr(cudnn, name, lambda *_, **__: None)
    split_heads_in_stages()
    SHAPES.clear()
    jax.clear_caches()


def attend(q, k, v, bias=None):
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, implementation="cudnn")


def arrays(heads=8, kv_heads=4, bias_heads=None):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(4, 16, heads, 8), (4, 16, kv_heads, 8), (4, 16, kv_heads, 8)]
    x = [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=False)]
    return x if bias_heads is None else [*x, jax.random.normal(keys[3], (4, bias_heads, 16, 16), jnp.float32)]


def value_and_gradients(fn, x):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(fn(*x).astype(jnp.float32) ** 2), argnums=tuple(range(len(x)))))(*x)


@pytest.mark.parametrize("bias_heads", [None, 1, 8], ids=["no bias", "a bias for all heads", "a bias for each head"])
def test_the_devices_of_a_stage_share_the_heads(bias_heads):
    mesh = jgt.make_mesh({"data": 2, "stage": 2, "tensor": 2})
    x = arrays(bias_heads=bias_heads)
    in_stage = jax.shard_map(
        attend, mesh=mesh, in_specs=(P("data"),) * len(x), out_specs=P("data"), axis_names={"data", "stage"}, check_vma=False
    )
    expected = value_and_gradients(attend, x)
    assert set(SHAPES) == {((4, 16, 8, 8), (4, 16, 4, 8))}
    SHAPES.clear()
    found = value_and_gradients(in_stage, x)
    # 2 of 4 rows, 4 of 8 heads, 2 of 4 heads of keys.
    assert set(SHAPES) == {((2, 16, 4, 8), (2, 16, 2, 8))} and len(SHAPES) == 2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_are_refused():
    mesh = jgt.make_mesh({"stage": 2, "tensor": 4})
    in_stage = jax.shard_map(attend, mesh=mesh, in_specs=(P(),) * 3, out_specs=P(), axis_names={"stage"}, check_vma=False)
    with pytest.raises(jgt.InputError, match=r"has 2 heads, which do not divide over the 4 devices of a pipeline's stage \(tensor\)"):
        jax.jit(in_stage).lower(*arrays(kv_heads=2))


@pytest.mark.parametrize("axes", [{"tensor"}, {"stage", "tensor"}], ids=["every axis of size above 1", "every axis"])
def test_where_all_axes_are_manual_jaxs_own_rule_applies(axes):
    mesh = jgt.make_mesh({"stage": 1, "tensor": 2}, devices=jax.devices()[:2])
    whole = jax.shard_map(
        attend, mesh=mesh, in_specs=(P(None, None, "tensor"),) * 3, out_specs=P(None, None, "tensor"), axis_names=axes, check_vma=False
    )
    x = arrays()
    np.testing.assert_allclose(np.float32(jax.jit(whole)(*x)), np.float32(jax.jit(attend)(*x)), rtol=1e-4, atol=1e-4)


def test_jax_has_the_names():
    for name in ("fwd", "bwd"):
        assert callable(getattr(cudnn, f"_dot_product_attention_{name}_p_wrapper").impl)
