"""cuDNN's kernels in blocks: with slow bodies in their place on CPU devices, and compiled for a described GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from plugin import needs_plugin

import jgt
from jgt import signal
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from jgt.replacements.context.blocks import XLA_BLOCKS, KeptRows

CALLS = []
"""The pass, and whether the kernel masks and gets a bias, of each call of a kernel."""


def noted(name, bias, mask_type):
    CALLS.append((name, mask_type == cudnn.MaskType.CAUSAL, bias.ndim == 4))
    return (None if bias.ndim < 4 else bias[:, 0] > -1e4), mask_type == cudnn.MaskType.CAUSAL


def forward(q, k, v, bias, *_, mask_type, scale, is_training, **__):
    out, lse = XLA_BLOCKS.forward(q, k, v, *noted("forward", bias, mask_type), scale)
    return [out.astype(q.dtype), lse] if is_training else [out.astype(q.dtype)]


def backward(q, k, v, bias, *rest, mask_type, scale, **_):
    lse, out, cotangent = rest[6:]
    grads = XLA_BLOCKS.backward(KeptRows(q, k, v, out, lse, cotangent), *noted("backward", bias, mask_type), scale)
    return [x.astype(q.dtype) for x in grads]


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels have bodies on CPU, and JAX asks no library whether they are there."""
    for name, body in (("fwd", forward), ("bwd", backward)):
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(body, multiple_results=True), platform="cpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    # The kernel is not for f32.
    monkeypatch.setattr(cudnn, "get_large_negative_number", lambda dtype: jnp.asarray(-1e9, dtype))
    for name in ("check_is_flash_attention", "check_layout"):
        monkeypatch.setattr(cudnn, name, lambda *_, **__: None)
    CALLS.clear()
    jax.clear_caches()


def loss_of(attend):
    def loss(params, batch):
        with signal.context("attn"):
            q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch["x"], params[name]), name) for name in "qkv")
            heads = signal.tensor(attend(q, k, v, batch.get("documents")), "heads")
        return jnp.mean(jnp.sin(heads.astype(jnp.float32)) ** 2)

    return loss


def by_jax(implementation):
    def attend(q, k, v, documents):
        mask = None if documents is None else (documents[:, :, None] == documents[:, None])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)

    return attend


def given(dtype, *, s, h, packed):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (16, n, h), dtype) * 0.3 for name, n, key in zip("qkv", (4, 2, 2), keys, strict=False)}
    documents = {"documents": jnp.sort(jax.random.randint(keys[0], (2, s), 0, 3), axis=-1)} if packed else {}
    return params, {"x": jax.random.normal(keys[3], (2, s, 16), dtype), **documents}


def rules(method):
    signals = {"attn": {"context": {"axis": "seq", "method": method}}}
    return {"inputs": ["data", "seq", "..."], "signals": signals, "default": "replicate"}


@pytest.mark.parametrize(
    ("method", "packed"),
    [("ring", False), pytest.param("ring", True, marks=pytest.mark.slow), pytest.param("ulysses", False, marks=pytest.mark.slow)],
)
def test_a_model_that_calls_the_kernel_has_it_in_each_block(on_cpu, method, packed):
    params, batch = given(jnp.float32, s=64, h=8, packed=packed)
    want = jax.jit(jax.value_and_grad(loss_of(by_jax("xla"))))(params, batch)
    mesh = jgt.make_mesh({"data": 2, "seq": 2}, devices=jax.devices()[:4])
    got = jax.jit(jax.value_and_grad(jgt.shard(loss_of(by_jax("cudnn")), rules(method), mesh)))(params, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) < 2e-6
    # In a ring some blocks are causal and some whole. Documents are a bias, in place of the kernel's mask.
    kinds = {(False, True)} if packed else {(True, False), (False, False)} if method == "ring" else {(True, False)}
    assert {call[1:] for call in CALLS} == kinds and {call[0] for call in CALLS} == {"forward", "backward"}


@needs_plugin
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_for_gpus_calls_it_and_has_no_array_of_all_scores(packed):
    params, batch = given(jnp.bfloat16, s=2048, h=64, packed=packed)
    mesh = jgt.make_mesh({"data": 1, "seq": 4}, devices=devices_of(Target.parse("h100:1x4")))
    step = jax.value_and_grad(jgt.shard(loss_of(by_jax(None)), rules("ring"), mesh))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, P())), (params, batch))
    with described():
        text = jax.jit(step).lower(*placed).compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    assert any("Backward" in line for line in calls) and any("Backward" not in line for line in calls)
    assert "2048,2048" not in text


@needs_plugin
def test_stages_of_a_pipeline_call_it_too():
    (params, batch), layers = given(jnp.bfloat16, s=2048, h=64, packed=False), 2
    params = {name: jnp.stack([w] * layers) for name, w in params.items()} | {"out": jnp.ones((layers, 4, 64, 16), jnp.bfloat16)}

    def loss(params, batch):
        def layer(x, w):
            with signal.context("attn"):
                q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", x, w[name]), name) for name in "qkv")
                heads = signal.tensor(by_jax("xla")(q, k, v, None), "heads")
                return x + jnp.einsum("bsnh,nhd->bsd", heads, w["out"]), None

        with signal.context("layers"):
            x = jax.lax.scan(layer, batch["x"], params)[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    mesh = jgt.make_mesh({"stage": 2, "seq": 2}, devices=devices_of(Target.parse("h100:1x4")))
    signals = {"layers/attn": {"context": {"axis": "seq", "method": "ring"}}}
    given_rules = {"inputs": [None, "seq", "..."], "signals": signals, "default": "replicate"}
    pipeline = jgt.Pipeline(signal="layers", microbatches=2, schedule="1f1b")
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, P())), (params, batch))
    with described():
        step = jax.value_and_grad(jgt.shard(loss, given_rules, mesh, pipeline=pipeline))
        text = jax.jit(step).lower(*placed).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text and "2048x2048" not in text
