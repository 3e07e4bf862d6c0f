"""Llama and GPT compared with slow references in numpy, and properties of any decoder. b batch, s seq, n heads, h head, d embed."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.models
from train.models.config import GPTConfig, ModelConfig
from train.models.decoder import build
from train.models.options import Options
from train.models.rope import rotate
from train.models.tokens import LayerFlags, Rows

LLAMA = ModelConfig(layers=2, embed=16, heads=4, kv_heads=2, ffn=24, vocab=50, seq=12)
GPT = GPTConfig(layers=2, embed=16, heads=4, ffn=24, vocab=50, seq=12)
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 12))


def make(config):
    model = build(config)
    params, variables = model.init(jax.random.key(0))
    # Not the initial values: unit scales and zero biases would hide where they are applied, small kernels what they do.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.jit(lambda params, tokens: model.apply(params, variables, tokens)), jax.tree.unflatten(tree, noisy)


# -- the reference -----------------------------------------------------------------------------------------------


def slow_attention(config, p, x, rope):
    def project(name, heads):
        bias = p[name].get("bias", 0)
        return (x @ p[name]["kernel"] + bias).reshape(*x.shape[:2], heads, config.head_size)

    q, k, v = project("q_proj", config.heads), project("k_proj", config.num_kv_heads), project("v_proj", config.num_kv_heads)
    if rope:
        q, k = slow_rope(q, config.rope_theta), slow_rope(k, config.rope_theta)
    out = np.zeros_like(q)
    for b, s, n in np.ndindex(*q.shape[:3]):
        shared = n // (config.heads // config.num_kv_heads)
        scores = np.array([q[b, s, n] @ k[b, t, shared] for t in range(s + 1)]) / np.sqrt(config.head_size)
        weights = np.exp(scores - scores.max())
        out[b, s, n] = (weights / weights.sum()) @ v[b, : s + 1, shared]
    return out.reshape(*x.shape[:2], -1) @ p["out"]["kernel"] + p["out"].get("bias", 0)


def slow_rope(x, theta):
    """Each pair (i, i + h/2), rotated by position * theta ** (-2i / h)."""
    out, half = np.zeros_like(x), x.shape[-1] // 2
    for s in range(x.shape[1]):
        for i in range(half):
            turn = np.exp(1j * s * theta ** (-2 * i / x.shape[-1]))
            pair = (x[:, s, :, i] + 1j * x[:, s, :, i + half]) * turn
            out[:, s, :, i], out[:, s, :, i + half] = pair.real, pair.imag
    return out


def rms_norm(p, x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * p["scale"]


def layer_norm(p, x, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def slow_llama(config, p, tokens):
    x = p["embed"]["embedding"][tokens]
    for i in range(config.layers):
        layer = jax.tree.map(lambda w, i=i: w[i], p["layers"])
        x = x + slow_attention(config, layer["attn"], rms_norm(layer["attn_norm"], x, config.norm_eps), rope=True)
        y = rms_norm(layer["mlp_norm"], x, config.norm_eps)
        gate = y @ layer["mlp"]["gate_proj"]["kernel"]
        hidden = gate / (1 + np.exp(-gate)) * (y @ layer["mlp"]["up_proj"]["kernel"])
        x = x + hidden @ layer["mlp"]["down"]["kernel"]
    table = p["embed"]["embedding"] if config.tied else p["head"]["unembedding"]
    return rms_norm(p["norm"], x, config.norm_eps) @ table.T


def slow_gpt(config, p, tokens):
    x = p["embed"]["embedding"][tokens] + p["positions"][: tokens.shape[1]]
    for i in range(config.layers):
        layer = jax.tree.map(lambda w, i=i: w[i], p["layers"])
        x = x + slow_attention(config, layer["attn"], layer_norm(layer["attn_norm"], x, config.norm_eps), rope=False)
        y = layer_norm(layer["mlp_norm"], x, config.norm_eps)
        hidden = y @ layer["mlp"]["up_proj"]["kernel"] + layer["mlp"]["up_proj"]["bias"]
        gelu = hidden * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + gelu @ layer["mlp"]["down"]["kernel"] + layer["mlp"]["down"]["bias"]
    return layer_norm(p["norm"], x, config.norm_eps) @ p["embed"]["embedding"].T


@pytest.mark.parametrize(
    ("config", "slow"),
    [(LLAMA, slow_llama), (ModelConfig(**{**vars(LLAMA), "tied": True}), slow_llama), (GPT, slow_gpt)],
    ids=["llama", "tied-llama", "gpt"],
)
def test_logits_are_those_of_the_reference(config, slow):
    apply, params = make(config)
    expected = slow(config, jax.tree.map(lambda x: np.asarray(x, np.float64), params), TOKENS)
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


def test_rotary_positions():
    x = np.random.default_rng(1).normal(size=(2, 5, 3, 8))
    rotated = rotate(jnp.asarray(x, jnp.float32), Options(rope_theta=100.0), LayerFlags(), Rows())
    np.testing.assert_allclose(rotated, slow_rope(x, 100.0), rtol=0, atol=1e-5)


# -- any decoder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_token_changes_no_logits_before_it(config):
    apply, params = make(config)
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_sequence_may_be_shorter_than_the_longest(config):
    apply, params = make(config)
    np.testing.assert_allclose(apply(params, TOKENS[:, :5]), apply(params, TOKENS)[:, :5], rtol=0, atol=1e-5)


def test_bf16_activations_keep_f32_parameters_and_logits():
    apply, params = make(ModelConfig(**{**vars(LLAMA), "dtype": "bf16"}))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    exact = make(LLAMA)[0](params, TOKENS)
    assert 1e-4 < np.abs(logits - exact).max() < 0.3 * np.abs(exact).max()


def test_kernels_start_scaled_by_their_inputs_and_different_in_each_layer():
    mlp = build(LLAMA).init(jax.random.key(0))[0]["layers"]["mlp"]
    assert mlp["up_proj"]["kernel"].shape == (2, 16, 24)
    assert np.std(mlp["up_proj"]["kernel"]) == pytest.approx(16**-0.5, rel=0.1)
    assert np.std(mlp["down"]["kernel"]) == pytest.approx((24 * 2 * LLAMA.layers) ** -0.5, rel=0.1)
    assert not np.allclose(*mlp["up_proj"]["kernel"])


def test_the_key_decides_about_the_parameters():
    first, second, other = (build(GPT).init(jax.random.key(seed))[0] for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert not np.allclose(first["positions"], other["positions"])


@pytest.mark.parametrize(
    ("keys", "ffn"),
    [({"gated": False, "embed": 96}, 384), ({"embed": 96}, 256), ({"embed": 128}, 384), ({"embed": 128, "ffn": 100}, 100)],
)
def test_the_width_of_the_mlp(keys, ffn):
    assert ModelConfig(**keys).ffn_size == ffn


FILES = sorted(Path(train.models.__file__).parent.rglob("*.py"))


def test_models_know_nothing_of_devices():
    """They neither lay out nor write what jgt writes into programs. `groups` are those of experts, which no device has."""
    words = re.compile(r"wide_gradients|jgt\.(trips|useful)|named_scope|shard|Mesh|PartitionSpec|devices|psum|observe")
    # A kernel is available or not on a device.
    found = {f"{path.name}: {line}" for path in FILES if path.name != "kernels.py" for line in code_lines(path) if words.search(line)}
    assert not found
    in_groups = {path.name for path in FILES for line in code_lines(path) if re.search(r"\bgroups\b", line)}
    assert in_groups <= {"routing.py", "config.py"}


def code_lines(path):
    """The lines of a file without comments and docstrings."""
    return ast.unparse(without_docstrings(ast.parse(path.read_text()))).splitlines()


def without_docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not is_text(one)] or [ast.Pass()]
    return tree


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_a_decoder_is_few_lines():
    names = ("decoder", "attention", "mlp", "moe", "rope")
    lines = [len(path.read_text().splitlines()) for path in FILES if path.stem in names]
    assert sum(lines) <= 800 and max(lines) <= 300


def test_models_know_nothing_of_jgt_but_signals():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jgt"):
                found |= {(path.name in ("config.py", "options.py"), node.module, name.name) for name in node.names}
            if isinstance(node, ast.Import):
                found |= {(path.name in ("config.py", "options.py"), name.name, "") for name in node.names if name.name.startswith("jgt")}
    of_config = {("jgt.document", "Bound"), ("jgt.document", "Node")}
    assert found == {(False, "jgt", "signal"), *((True, *names) for names in of_config)}
