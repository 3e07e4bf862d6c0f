"""The attention kernel that a run gets, the values that its recompute keeps, and 8-bit matmuls."""

import re
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from plugin import needs_plugin

from jgt import document
from jgt.document import InputError
from jgt.planner import has_foreign_mask
from jgt.planner.compiled import compile_function
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from jgt.program import kernels
from train.config import load
from train.models import eight_bits as fp8
from train.models.config import AttentionName, ModelConfig
from train.models.decoder import build
from train.models.kernels import CUDNN, KERNELS, XLA, AttentionChoice, choose_attention
from train.setup import prepare
from train.setup.remat import Keep

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
BF16 = ModelConfig(dtype="bf16", embed=128, heads=2)


# -- the choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "device", "why"),
    [
        (BF16, CPU, "there is no NVIDIA GPU"),
        (BF16, None, "there is no NVIDIA GPU"),
        (BF16, SimpleNamespace(platform="gpu", device_kind="AMD MI300X"), "there is no NVIDIA GPU"),
        (ModelConfig(), GPU, "it needs model.dtype: bf16"),
        (ModelConfig(dtype="bf16", attention_sinks=True), GPU, "it has no attention_sinks"),
        (ModelConfig(dtype="bf16", embed=520, heads=2), GPU, "The head dim must be <= 128 and a multiple of 8, but got 260"),
    ],
)
def test_without_support_attention_is_xlas_and_says_why(config, device, why):
    with described():
        assert choose_attention(config, device) == AttentionChoice(kernel=XLA, why=why)


def test_the_devices_of_a_pipelines_stage_share_the_heads():
    with described():
        assert choose_attention(BF16, GPU, sharing=BF16.num_kv_heads) == AttentionChoice(kernel=CUDNN)
        why = f"its {BF16.num_kv_heads} kv_heads do not divide over the 3 devices of a pipeline's stage"
        assert choose_attention(BF16, GPU, sharing=3) == AttentionChoice(kernel=XLA, why=why)


def test_with_support_it_is_cudnns_unless_xlas_is_asked_for():
    with described():
        assert choose_attention(BF16, GPU) == AttentionChoice(kernel=CUDNN)
    assert choose_attention(ModelConfig(dtype="bf16", attention="xla"), GPU) == AttentionChoice(kernel=XLA)


def test_cudnn_that_cannot_be_had_is_an_error(tiny_file):
    run = load(tiny_file, ["model.attention=cudnn"])
    with pytest.raises(InputError, match=r"model\.attention: cudnn is not available here: there is no NVIDIA GPU\. Use auto"):
        prepare(run)


def test_a_kernel_is_known_by_one_name():
    names = {kernel.name for kernel in KERNELS}
    assert {"auto", *names} == set(get_args(AttentionName))
    assert names - {"xla"} <= {kernel.name for kernel in kernels.KERNELS}
    assert KERNELS[-1] is XLA


# -- masks -------------------------------------------------------------------------------------------------------


def planned_text(tiny_file, rules, *overrides):
    """The training step with masked documents, compiled for 8 GPUs, and its setup."""
    target, small = Target.parse("h100:1x8"), "model={layers: 2, embed: 64, heads: 4, kv_heads: 2, ffn: 64, seq: 64, dtype: bf16}"
    run = load(
        tiny_file, [small, f"rules={rules}", "mesh={data: 2, fsdp: 2, tensor: 2}", "train.batch=16", "data.documents=mask", *overrides]
    )
    with described():
        setup = prepare(run, num_devices=8, like=devices_of(target)[0])
    return compile_function(setup.train_step(), setup.step_shapes, target).text, setup


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "block"])
def test_cudnns_kernel_gets_the_mask_of_its_devices_rows(tiny_file, rules_dir, remat):
    text, setup = planned_text(tiny_file, str(rules_dir / "fsdp_tensor.yaml"), f"train.remat={remat}")
    assert setup.program.attention.kernel is CUDNN
    calls = [line for line in text.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    # 16 rows on 4 devices, and no score of a head in memory.
    assert len(calls) >= 2
    assert all("ScaleBiasSoftmax" in call and "bf16[4,1,64,64]" in call and "CAUSAL" in call for call in calls)
    assert not re.search(r"\[4,2,64,64\]", text)
    assert not has_foreign_mask(text)


@needs_plugin
@pytest.mark.slow
def test_a_mask_of_other_rows_is_noticed(tiny_file, rules_dir):
    whole = tiny_file.with_name("whole.yaml")
    whole.write_text(document.dump({"extends": str(rules_dir / "fsdp_tensor.yaml"), "inputs": {"segments": [], "**": ["batch", "..."]}}))
    assert has_foreign_mask(planned_text(tiny_file, str(whole))[0])


# -- what is kept ------------------------------------------------------------------------------------------------


def test_attention_that_is_recomputed_keeps_no_scores():
    q = jnp.ones((2, 8, 2, 4))
    recomputed = jax.checkpoint(XLA.attend, policy=Keep(remat="attention"))
    kept = {attend: [x.shape for x, _ in saved_residuals(attend, q, q, q)] for attend in (XLA.attend, recomputed)}
    assert any(shape[-2:] == (8, 8) for shape in kept[XLA.attend])
    assert not any(shape[-2:] == (8, 8) for shape in kept[recomputed])


# -- eight bits --------------------------------------------------------------------------------------------------

X, KERNEL = jax.random.normal(jax.random.key(0), (3, 5, 64)), jax.random.normal(jax.random.key(1), (64, 32))


def eight_bits(x, dtype):
    """x rounded as by numpy's 8-bit type, after scaling its largest value to the largest value of the type."""
    scale = np.abs(x).max() / float(jnp.finfo(dtype).max)
    return np.asarray(x / scale, dtype).astype(np.float32) * scale


def test_a_matmul_in_eight_bits_is_that_of_rounded_sides():
    expected = eight_bits(X, jnp.float8_e4m3fn) @ eight_bits(KERNEL, jnp.float8_e4m3fn)
    np.testing.assert_allclose(fp8.dots(X, [KERNEL])[0], expected, rtol=1e-4, atol=1e-4)


def test_its_gradients_are_those_of_rounded_sides():
    cotangent = jax.random.normal(jax.random.key(2), (3, 5, 32))
    by_x, by_kernel = jax.vjp(lambda x, k: fp8.dots(x, [k])[0], X, KERNEL)[1](cotangent)
    rounded = eight_bits(cotangent, jnp.float8_e5m2)
    np.testing.assert_allclose(by_x, rounded @ eight_bits(KERNEL, jnp.float8_e4m3fn).T, rtol=1e-4, atol=1e-4)
    expected = np.einsum("bsk,bsn->kn", eight_bits(X, jnp.float8_e4m3fn), rounded)
    np.testing.assert_allclose(by_kernel, expected, rtol=1e-4, atol=1e-4)


def test_several_kernels_that_read_one_array_add_up_its_cotangent():
    kernels = [jax.random.normal(jax.random.key(n), (64, n)) for n in (8, 4, 4)]
    cotangents = [jax.random.normal(jax.random.key(n), (3, 5, k.shape[1])) for n, k in enumerate(kernels)]
    wanted, pull = jax.vjp(lambda x, *k: tuple(fp8.dots(x, [one])[0] for one in k), X, *kernels)
    found, pull_found = jax.vjp(lambda x, *k: fp8.dots(x, k, "operand"), X, *kernels)
    for a, b in zip([*found, *pull_found(tuple(cotangents))], [*wanted, *pull(tuple(cotangents))], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x", [jnp.zeros((1, 2, 16)), jnp.full((1, 2, 16), 1e30), jnp.full((1, 2, 16), 1e-30)])
def test_extreme_tensors_stay_finite(x):
    assert jnp.all(jnp.isfinite(fp8.dots(x, [jnp.ones((16, 4))])[0]))


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_a_model_in_eight_bits_is_near_the_model(kind):
    tokens = jnp.arange(16).reshape(2, 8)
    plain, eight = (build(ModelConfig(kind=kind, layers=2, embed=32, heads=2, vocab=20, seq=8, fp8=fp8)) for fp8 in (False, True))
    params, _ = plain.init(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(eight.init(jax.random.key(0))[0])
    a, b = plain.apply(params, {}, tokens), eight.apply(params, {}, tokens)
    assert 0 < np.linalg.norm(a - b) < 0.2 * np.linalg.norm(a)
