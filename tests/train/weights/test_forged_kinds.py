"""Forged folders of experts in four bits, matrices in eight bits, latent attention, routers and yarn: each is named in one message.

A case changes the tensors and the config.json of a sound folder. It is refused when its config.json is read, or its tensors.
"""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDENS
from hostile import assert_lines
from test_four_bits import in_four_bits

import jgt
from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.weights.described import published
from train.weights.load import open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

L = "model.layers.1."
GATE, KV, Q = f"{L}mlp.gate.weight", f"{L}self_attn.kv_b_proj.weight", f"{L}self_attn.q_a_proj.weight"
BIAS, ROPE = f"{L}mlp.gate.e_score_correction_bias", f"{L}self_attn.kv_a_proj_with_mqa.weight"
EIGHT = {"quant_method": "fp8", "weight_block_size": [8, 8]}
TOLD = {"quantization_config": EIGHT}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def ones(*shape):
    return np.ones(shape, np.float32)


def same(tensors):
    """The tensors as they are."""


def with_value(array, value):
    changed = array.copy()
    changed.flat[changed.size // 2] = value
    return changed


def put(name, change):
    """Another array in the place of a tensor, a new tensor, or (None) none."""

    def changed(tensors):
        value = change(tensors.get(name)) if callable(change) else change
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return changed


def in_eight_bits(name, scale, size=np.float32):
    """A matrix in eight bits with these scales; None: without."""

    def changed(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        if scale is not None:
            tensors[f"{name}_scale_inv"] = np.full([-(-n // 8) for n in tensors[name].shape] if scale == 1 else scale, 1, size)

    return changed


def yarn(**changes):
    return {"rope_parameters": {**YARN, **changes}}


NAN, INF = (lambda x: with_value(x, np.nan)), (lambda x: with_value(x, np.inf))
V3, OSS, GLM, M2 = "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2"
UP, DOWN = (f"{L}mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
CASES = {
    # latent attention
    "no matrix of the latent": (V3, put(KV, None), {}, f"the tensor {KV} [80, 20] is missing"),
    "a matrix of the latent cut short": (V3, put(KV, lambda x: x[:-1]), {}, f"{KV} has the shape [79, 20], but the model needs [80, 20]"),
    "a latent that is transposed": (V3, put(Q, lambda x: x.T.copy()), {}, f"{Q} has the shape [32, 24], but the model needs [24, 32]"),
    "no rotated keys": (V3, put(ROPE, lambda x: x[:20]), {}, f"{ROPE} has the shape [20, 32], but the model needs [24, 32]"),
    "keys of another family": (
        V3,
        put(f"{L}self_attn.k_proj.weight", ones(32, 32)),
        {},
        "k_proj.weight [32, 32] is not part",
    ),
    "queries without a latent": (V3, same, {"q_lora_rank": None}, "the key 'q_lora_rank' is missing"),
    "NaN in the latent": (V3, put(KV, NAN), {}, f"{KV}: has NaN or infinite numbers"),
    "NaN in a norm of the latent": (V3, put(f"{L}self_attn.kv_a_layernorm.weight", NAN), {}, "kv_a_layernorm.weight: has NaN"),
    "an infinite embedding": (V3, put("model.embed_tokens.weight", INF), {}, "model.embed_tokens.weight: has NaN or infinite"),
    "a latent of whole numbers": (V3, put(KV, lambda x: x.astype(np.int32)), {}, "has tensors of the type int32"),
    "another head": (V3, same, {"qk_nope_head_dim": 16}, "qk_head_dim: 12 is not supported"),
    "values of another width": (V3, same, {"v_head_dim": 20}, "the model needs"),
    "heads that contradict": (V3, same, {"qk_head_dim": 99}, "qk_head_dim"),
    # routers
    "no bias of a router": (V3, put(BIAS, None), {}, f"the tensor {BIAS} [8] is missing"),
    "a bias of fewer experts": (V3, put(BIAS, lambda x: x[:4]), {}, f"{BIAS} has the shape [4], but the model needs [8]"),
    "NaN in a bias of a router": (V3, put(BIAS, NAN), {}, f"{BIAS}: has NaN or infinite numbers"),
    "a bias where none is": (
        "qwen3_moe",
        put(f"{L}mlp.gate.e_score_correction_bias", ones(8)),
        {},
        "is not part of the model",
    ),
    "a router of fewer experts": (GLM, put(GATE, lambda x: x[:-1]), {}, "mlp.gate.weight has the shape"),
    "no router": (GLM, put(GATE, None), {}, "mlp.gate.weight [8, 32] is missing"),
    "experts in the dense layer": (
        V3,
        put("model.layers.0.mlp.gate.weight", ones(8, 32)),
        {},
        "0.mlp.gate.weight [8, 32] is not",
    ),
    "more dense layers": (V3, same, {"first_k_dense_replace": 2}, "model.layers.1.mlp.down_proj.weight [32, 48] is missing"),
    "dense layers alone": (V3, same, {"first_k_dense_replace": 3}, "first_dense 3 leaves none of the 3 layers"),
    "groups that do not divide": (V3, same, {"n_group": 3}, "count 8 is not divisible by 3 groups"),
    "groups with too few experts": (V3, same, {"topk_group": 1}, "1 groups have 2 experts, but choose is 4"),
    "no bias that is used": (M2, same, {"use_routing_bias": False}, "use_routing_bias: false is not supported"),
    "scores of another kind": (V3, same, {"scoring_func": "softmax"}, "scoring_func"),
    # yarn
    "yarn with a length beside it": (V3, same, yarn(max_position_embeddings=7), "max_position_embeddings"),
    "yarn of a text": (V3, same, yarn(factor="40"), "factor must be a number above 0, not '40'"),
    "yarn by NaN": (V3, same, yarn(factor=float("nan")), "factor must be a number above 0, not nan"),
    "yarn that contradicts rope_scaling": (V3, same, {**yarn(), "rope_scaling": {**YARN, "factor": 4.0}}, "say different things"),
    "yarn whose fast is below slow": (V3, same, yarn(beta_fast=1.0, beta_slow=32.0), "fast"),
    "yarn of no length": (V3, same, yarn(original_max_position_embeddings=0), "original_max_position_embeddings must be"),
    "yarn with a key of another kind": (V3, same, yarn(low_freq_factor=1.0), "low_freq_factor"),
    # eight bits
    "eight bits without a scale": (V3, in_eight_bits(KV, None), TOLD, "has tensors of the type float8_e4m3fn"),
    "eight bits that nothing tells": (V3, in_eight_bits(KV, 1), {}, "has tensors of the type float8_e4m3fn"),
    "eight bits with too few scales": (
        V3,
        in_eight_bits(KV, [10, 2]),
        TOLD,
        f"{KV} [80, 20] needs one of [10, 3]",
    ),
    "eight bits with whole scales": (V3, in_eight_bits(KV, 1, np.int32), TOLD, "_scale_inv is int32[10, 3]"),
    "blocks of three dims": (
        V3,
        same,
        {"quantization_config": {**EIGHT, "weight_block_size": [8] * 3}},
        "weight_block_size: [8, 8, 8]",
    ),
    # four bits
    "no scales": (OSS, put(f"{UP}_scales", None), {}, f"{UP}_blocks in"),
    "no blocks": (OSS, put(f"{DOWN}_blocks", None), {}, f"{DOWN}_scales in"),
    "blocks cut short": (OSS, put(f"{UP}_blocks", lambda x: x[:, :-1]), {}, "but its blocks need uint8"),
    "fewer experts": (OSS, lambda t: [put(f"{UP}_{n}", lambda x: x[:-1])(t) for n in ("blocks", "scales")], {}, f"{UP} has the shape"),
    "a scale of NaN": (OSS, put(f"{UP}_scales", lambda x: np.full_like(x, 255)), {}, f"{UP}: has NaN or infinite numbers"),
    "NaN in sinks": (OSS, put(f"{L}self_attn.sinks", NAN), {}, "self_attn.sinks: has NaN or infinite numbers"),
    "sinks of fewer heads": (OSS, put(f"{L}self_attn.sinks", lambda x: x[:-1]), {}, "self_attn.sinks has the shape"),
    "a bias of experts cut short": (OSS, put(f"{UP}_bias", lambda x: x[:, :-1]), {}, f"{UP}_bias has the shape"),
}


def forged(path, kind, change, values):
    """The folder of a case."""
    if kind == OSS:
        path = in_four_bits(path, change=change)[0]
        values = {**json.loads((path / "config.json").read_text()), **values}
        (path / "config.json").write_text(json.dumps(values))
        return path
    folder = open_folder(GOLDENS / kind)
    arrays = {name: folder.read(name) for name in folder.tensors}
    change(arrays)
    told = {**json.loads((GOLDENS / kind / "config.json").read_text()), **values}
    told = {name: value for name, value in told.items() if value is not None}
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    pieces = ((name, (), array) for name, array in arrays.items())
    write_folder(path / kind, shapes, pieces, files={"config.json": json.dumps(told).encode()}, max_file_bytes=1 << 20)
    return path / kind


def load(path):
    """The model of a folder, with all of its tensors."""
    described, problems = published(path), []
    config = bind(Node.of({**described.keys, "seq": 32}, f"{described.file}:1", "model"), ModelConfig, problems)
    if problems:
        raise jgt.InputError(problems)
    shapes, variables = jax.eval_shape(build(config).init, jax.random.key(0))
    files, here = open_files(described, config, shapes), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for load, tree in ((files.load, shapes), (files.variables, variables)):
        load(tree, jax.tree.map(lambda _: here, tree))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [V3, OSS, GLM, M2])
def test_sound_folders_are_read(kind, tmp_path):
    load(forged(tmp_path, kind, lambda tensors: None, {}))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if n % 12 else ()) for n, name in enumerate(CASES)])
def test_a_forged_folder_is_named(name, tmp_path):
    kind, change, values, message = CASES[name]
    path = forged(tmp_path, kind, change, values)
    with pytest.raises(jgt.InputError) as caught:
        load(path)
    assert_lines(caught.value.problems)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
    assert all(str(path) in problem for problem in caught.value.problems)
