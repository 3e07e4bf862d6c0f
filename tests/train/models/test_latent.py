"""Multi-head latent attention: torch's gradients, a cache of latents, other widths of values in kernels and on split sequences."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS, config_of, expected, loaded, variables_of
from plugin import needs_plugin

import jgt
from jgt import document
from jgt.document import Node, bind
from jgt.planner.described import described_device, devices_of
from jgt.planner.hardware.target import Target
from train.config import load
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.kernels import CUDNN, XLA, choose_attention
from train.setup import prepare
from train.weights.described import published
from train.weights.load import open_files

RULES = Path(__file__).parents[3] / "configs" / "rules"
LATENT = {"rank": 20, "query_rank": 24, "rope_dim": 4, "value_dim": 12}
LAYOUTS = {
    "fsdp_tensor": ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "experts": ("experts", {"data": 2, "fsdp": 2, "expert": 2}, {}),
    "ring": ("context", {"data": 2, "fsdp": 1, "seq": 2, "tensor": 2}, {}),
    "gather": ("context", {"data": 2, "fsdp": 1, "seq": 4, "tensor": 1}, {"layers/attn": {"context": {"axis": "seq", "method": "gather"}}}),
    "overlap": ("overlap", {"data": 2, "fsdp": 2, "tensor": 2}, {}),
}


def model_config(**keys):
    problems = []
    config = bind(
        Node.of({"layers": 2, "embed": 32, "heads": 4, "head_dim": 12, "latent": LATENT, **keys}, "run", "model"), ModelConfig, problems
    )
    return config, [problem.partition(": ")[2] for problem in problems]


def the_loss(model, variables, tokens):
    def loss(params):
        logits = model.apply(params, variables, tokens)
        logs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)), logits

    return loss


def biggest(found, wanted):
    """The largest difference of each array, over the largest number in it."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max() / (np.abs(y).max() + 1e-9)), found, wanted)))


def test_gradients_are_those_of_torch():
    config = config_of("deepseek_v3")
    model, params, variables = build(config), loaded("deepseek_v3", config), variables_of("deepseek_v3", config)
    found = jax.jit(jax.grad(the_loss(model, variables, expected("deepseek_v3")[0]), has_aux=True))(params)[0]
    files = open_files(published(GOLDENS.parent / "gradients" / "deepseek_v3"), config, jax.tree.map(jax.typeof, params))
    assert biggest(found, files.load(params, jax.tree.map(lambda x: x.sharding, params))) < 1e-4


@pytest.mark.parametrize("layout", [name if name == "ring" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_logits_and_gradients_are_the_same_on_meshes(layout, tmp_path):
    name, sizes, signals = LAYOUTS[layout]
    file = tmp_path / "rules.yaml"
    file.write_text(document.dump({"extends": str(RULES / f"{name}.yaml"), "signals": signals}))
    config = config_of("deepseek_v3")
    model, variables = build(config), variables_of("deepseek_v3", config)
    params = jax.tree.map(jnp.asarray, jax.device_get(loaded("deepseek_v3", config)))
    whole = np.tile(expected("deepseek_v3")[0], (4, 1))
    loss, wanted, std = the_loss(model, variables, whole), *expected("deepseek_v3")[1:]
    plain = jax.jit(jax.grad(loss, has_aux=True))(params)[0]
    shard = jgt.shard(loss, jgt.load_rules(file), jgt.make_mesh(sizes), partial=True)
    host = jax.device_get(params)
    gradient, logits = jax.jit(jax.grad(shard, has_aux=True))(host)
    assert np.abs(logits[:2, ::5] - wanted).max() < 5e-5 * std
    assert biggest(gradient, jax.device_get(plain)) < 2e-5


@pytest.mark.slow
def test_a_step_in_a_pipeline_is_the_step(tiny):
    stages = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}", "pipeline={signal: layers, microbatches: 4}")
    found = []
    for layout in (("mesh={data: 1}", "rules=null"), stages):
        run = tiny(f"model.latent={LATENT}", "model.head_dim=12", "model.kv_heads=null", "model.heads=4", "model.layers=2", *layout)
        setup = prepare(run, devices=jax.devices()[: 4 if run.pipeline else 1])
        state, step = setup.init(), setup.compile_train_step()
        tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
        for number in range(2):
            state, metrics = step(state, jax.device_put(batch, setup.batch_shardings), setup.settings(number + 1))
            found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    np.testing.assert_allclose(found[2:], found[:2], rtol=1e-5)


@pytest.mark.parametrize(
    "keys", [{}, {"latent": {**LATENT, "query_rank": None}, "window": 6, "full_layers": [1], "biases": ["qkv", "out"]}], ids=str
)
def test_a_text_read_and_written_is_the_text_at_once(keys):
    config, _ = model_config(seq=32, dtype="f32", rope_pairs="neighbours", **keys)
    model = build(config)
    params, variables = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 256)
    whole = model.apply(params, variables, tokens)

    def run(use):
        return model.run(use, params, variables, False)[0]

    lengths = jnp.array([7, 9])
    logits, cache = run(lambda m: m.read(tokens[:, :9], lengths, jnp.int32(0), 32))
    np.testing.assert_allclose(logits, [whole[0, 6], whole[1, 8]], rtol=0, atol=2e-5)
    for _ in range(8):
        logits, cache = run(lambda m, now=lengths, before=cache: m.write(tokens[jnp.arange(2), now], now, before))
        np.testing.assert_allclose(logits, whole[jnp.arange(2), lengths], rtol=0, atol=2e-5)
        lengths = lengths + 1


def test_a_cache_has_a_latent_and_a_rotated_key_of_each_token():
    config, _ = model_config(seq=1024, layers=3, dtype="bf16")
    model, tokens = build(config), jnp.zeros((5, 8), jnp.int32)

    def read(params, variables):
        return model.run(lambda m: m.read(tokens, jnp.full(5, 8), jnp.int32(0), 1024), params, variables, False)[0][1]

    shapes = jax.eval_shape(read, *jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) == 5 * 1024 * 3 * (20 + 4) * 2 + 4
    # DeepSeek-V3: 576 numbers in the place of 128 · (192 + 128).
    v3 = ModelConfig(heads=128, head_dim=192, latent=dataclasses.replace(config.latent, rank=512, rope_dim=64, value_dim=128))
    heads, *widths = v3.kept_sizes
    assert 128 * (v3.head_size + v3.value_size) // (heads * sum(widths)) == 71


def test_flops_count_the_width_of_values():
    one, other = model_config()[0], model_config(latent={**LATENT, "value_dim": 6})[0]
    assert one.flops_per_token(1000) - other.flops_per_token(1000) == 6 * 2 * 4 * 6 * one.seq / 2


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"latent": {**LATENT, "rope_dim": 12}}, "rope_dim 12 is not below the 12 elements of a head. Change it, or head_dim"),
        ({"latent": {**LATENT, "rope_dim": 3}}, "RoPE rotates pairs, but rope_dim is the odd number 3. Use an even number"),
        ({"qk_norm": "head"}, "it rotates rope_dim elements, and has norms of its own"),
        ({"kv_heads": 2}, "2, but with latent each of the 4 heads has keys of its own. Leave it out"),
        ({"latent": {**LATENT, "longest": 64}, "seq": 128}, "beyond 64 tokens the model's attention is sparse, which jgt does not compute"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(keys, problem):
    assert problem in str(model_config(**keys)[1])


def test_a_model_with_an_indexer_is_refused_beyond_its_tokens(tmp_path):
    run = load({"model": {"hf": str(GOLDENS / "deepseek_v32"), "seq": 96}})
    assert run.config.model.latent.longest == 96
    with pytest.raises(jgt.InputError, match=r"model.seq: beyond 96 tokens the model's attention is sparse.* Use 96 at most"):
        load({"model": {"hf": str(GOLDENS / "deepseek_v32"), "seq": 128}})
    config = config_of("deepseek_v32")
    files = open_files(published(GOLDENS / "deepseek_v32"), config, jax.eval_shape(build(config).init, jax.random.key(0))[0])
    assert files.left_out == "15 tensors of other parts are left out (.self_attn.indexer.)"


# -- kernels -------------------------------------------------------------------------------------------------------


def plain_attention(q, k, v):
    scores = np.einsum("bqnh,bknh->bnqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnqk,bknu->bqnu", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("width", [4, 12])
def test_values_may_have_another_width(width):
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 9, 2, size)) for n, size in enumerate((8, 8, width)))
    np.testing.assert_allclose(XLA.attend(q, k, v), plain_attention(q, k, v), rtol=0, atol=1e-5)


@needs_plugin
def test_cudnn_computes_the_widths_of_deepseek_on_hopper():
    keys = {"dtype": "bf16", "head_dim": 192, "latent": {"rank": 512, "query_rank": 64, "rope_dim": 64, "value_dim": 128}}
    gpu = jax.devices()[0]
    config = model_config(**keys)[0]
    assert choose_attention(config, gpu).why == "there is no NVIDIA GPU"
    q, k, v = (jax.ShapeDtypeStruct((1, 128, 4, size), jnp.bfloat16) for size in (192, 192, 128))
    hopper, ampere = (Target.parse(f"{name}:1x8") for name in ("h100", "a100"))
    with described_device(hopper):
        assert choose_attention(config, devices_of(hopper)[0]).kernel is CUDNN
        assert jax.eval_shape(CUDNN.attend, q, k, v).shape == v.shape
    with described_device(ampere):
        assert choose_attention(config, devices_of(ampere)[0]).why == "The head dim must be <= 128 and a multiple of 8, but got 192"


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("q_a_proj", "kv_b_proj")), "experts/gate"])
def test_adapters_are_the_model_with_the_sums(tiny_file, module):
    lora = f"lora={{rank: 4, alpha: 8, modules: ['{module}']}}"
    experts = "model.experts={count: 4, choose: 2, ffn: 16}"
    run = load(
        tiny_file, [lora, experts, "mesh={data: 1}", "rules=null", "model.head_dim=12", "model.kv_heads=null", f"model.latent={LATENT}"]
    )
    setup = prepare(run, devices=jax.devices()[:1])
    state = setup.init()
    params, adapters = setup.last_params(state), setup.program.adapters
    params = jax.tree.map_with_path(lambda path, x: x + 0.1 if jgt.path_text(path).endswith("lora_b") else x, params)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 256)
    model, base = adapters.model, adapters.base

    def texts(model, params):
        def use(module):
            logits, cache = module.read(tokens, jnp.array([9, 6]), jnp.int32(0), 16)
            return logits, module.write(tokens[:, 0], jnp.array([9, 6]), cache)[0]

        return model.run(use, params, state.variables, False)[0]

    found, wanted = texts(model, params), texts(base, adapters.merged(params))
    for one, other, plain in zip(found, wanted, texts(base, adapters.divided(params)[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
        assert np.abs(one - plain).max() > 1e-3
