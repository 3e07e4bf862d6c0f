"""`train.remat`: the values that a layer keeps, the matmuls that the compiled step computes again, and gradients that do not change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals
from plugin import needs_plugin

from jgt.planner.compiled import compile_function
from jgt.planner.described import described, devices_of
from jgt.planner.hardware.target import Target
from train.config import load
from train.models.config import GPTConfig, ModelConfig
from train.models.decoder import Block, build
from train.models.kernels import XLA
from train.models.tokens import LayerFlags, Rows
from train.setup import prepare
from train.setup.remat import Keep, with_remat_of

KINDS = {"llama": ModelConfig, "gpt": GPTConfig}
PROJECTED = {"llama": ("q", "k", "v", "heads", "out", "gate", "up"), "gpt": ("q", "k", "v", "heads", "out", "up")}
NUM_MERGED = {"llama": 3, "gpt": 2}
"""k and v into q, and up into gate."""
EMBED, FFN, SEQ = 16, 40, 8


def config_of(kind, **options):
    return KINDS[kind](layers=2, embed=EMBED, heads=2, ffn=FFN, vocab=20, seq=SEQ, **options)


def differentiated(kind, remat, **options):
    """The gradients of a function of the model's logits, as a compiled function, and the parameters."""
    model = build(config_of(kind, **options))
    (params, _), tokens = model.init(jax.random.key(0)), jnp.arange(2 * SEQ).reshape(2, SEQ)
    loss = with_remat_of(lambda params: jnp.sum(jnp.sin(model.apply(params, {}, tokens))), remat, XLA, "run.yaml:1")
    return jax.jit(jax.grad(loss)).lower(params).compile(), params


def num_dots(kind, remat, **options):
    return differentiated(kind, remat, **options)[0].as_text().count(" dot(")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, pytest.param({"dtype": "bf16", "fp8": True}, marks=pytest.mark.slow)])
def test_matmuls_recomputes_the_scores_of_attention_alone(kind, options):
    num_kept = num_dots(kind, "none", **options)
    assert num_dots(kind, "matmuls", **options) == num_dots(kind, PROJECTED[kind], **options) == num_kept + 1
    # All but the last matmul of each half of a layer, whose results nothing reads backward. In fp8, those of one array are one matmul.
    num_projected = len(PROJECTED[kind]) - (NUM_MERGED[kind] if "fp8" in options else 0)
    assert num_dots(kind, "block", **options) == num_kept + num_projected + 1


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_whatever_is_recomputed(kind):
    def gradients(remat):
        gradient, params = differentiated(kind, remat)
        return gradient(params)

    kept = gradients("none")
    # Of all gradients: those of the keys' biases are zero, but for rounding.
    largest = max(np.abs(x).max() for x in jax.tree.leaves(kept))
    for remat in ("matmuls", "attention", "block", ("hidden",)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest), gradients(remat), kept)


def kept_by(kind, remat):
    """Type and shape of each value of the batch's size that a layer in bf16 keeps, its input included."""
    graph, params = nnx.split(Block(config_of(kind, dtype="bf16"), XLA, rngs=nnx.Rngs(0)))
    layer = lambda x, params: nnx.merge(graph, params)(x, Rows(), LayerFlags())  # noqa: E731
    layer = layer if remat == "none" else jax.checkpoint(layer, policy=Keep(remat=remat), prevent_cse=False)
    kept = saved_residuals(layer, jnp.zeros((3, SEQ, EMBED), jnp.bfloat16), params)
    return sorted((str(x.dtype), *x.shape) for x, _ in kept if x.shape[:2] == (3, SEQ) and x.shape[2:] != (1,))


@pytest.mark.parametrize("kind", KINDS)
def test_no_f32_copy_of_the_stream_is_kept_and_no_derivative_of_the_mlp(kind):
    heads, stream, wide = ("bfloat16", 3, SEQ, 2, EMBED // 2), ("bfloat16", 3, SEQ, EMBED), ("bfloat16", 3, SEQ, FFN)
    num_read = {"llama": 2, "gpt": 1}[kind]
    kept = kept_by(kind, "attention")
    assert not [value for value in kept if value[0] != "bfloat16" and len(value) > 3]
    assert kept.count(wide) == num_read + 1
    # q, k, v and attention's result; the layer's input, that of its MLP and their norms.
    assert (kept.count(heads), kept.count(stream)) == (4, 4)
    assert kept_by(kind, "block") == [stream]


def test_matmuls_keeps_one_array_a_matmul():
    heads, stream, wide = ("bfloat16", 3, SEQ, 2, EMBED // 2), ("bfloat16", 3, SEQ, EMBED), ("bfloat16", 3, SEQ, FFN)
    # q, k, v and the result of attention's projection as the matmuls leave them; the layer's input; attention's result.
    assert kept_by("llama", "matmuls") == sorted([stream] * 5 + [heads] + [wide] * 2)


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("remat", "runs"), [("matmuls", 1), ("[heads]", 1), ("block", 2)])
def test_cudnns_kernel_runs_once_where_its_result_is_kept(tiny_file, rules_dir, remat, runs):
    target, small = Target.parse("h100:1x8"), "model={layers: 2, embed: 64, heads: 4, kv_heads: 2, ffn: 64, seq: 64, dtype: bf16}"
    rules = f"rules={rules_dir / 'fsdp_tensor.yaml'}"
    run = load(tiny_file, [small, rules, "mesh={data: 2, fsdp: 2, tensor: 2}", "train.batch=16", f"train.remat={remat}"])
    with described():
        setup = prepare(run, num_devices=8, like=devices_of(target)[0])
    text = compile_function(setup.train_step(), setup.step_shapes, target).text
    assert len(re.findall(r'custom_call_target="__cudnn\$fmha\w*(?<!Backward)"', text)) == runs
