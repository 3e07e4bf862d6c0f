"""Published models: the logits of transformers (tests/goldens/weights, made by make_goldens.py), on any mesh, and every option counts."""

import dataclasses
import json
import os
import re
from pathlib import Path

import families_table
import jax
import numpy as np
import pytest
from golden_models import GOLDENS, NAMES, config_of, expected, loaded, tolerance, variables_of

import jgt
from train.config import load
from train.models.decoder import build
from train.models.experts.config import ExpertsConfig
from train.models.options import Options, RopeScaling
from train.weights.described import described_by, published
from train.weights.families.families import FAMILIES
from train.weights.load import ROUTER_BIAS, open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

ROOT = Path(__file__).parents[3]
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}
INNER = {
    "rope_scaling": ("fast", "truncate", "query_growth", "magnitude"),
    "experts": ("groups", "normalized", "result_scale", "score"),
}
"""Keys of nested sections that count one by one."""
PARTS = {"rope_scaling": RopeScaling, "experts": ExpertsConfig}
QUICK = ("gemma2", "ministral3", "llama_yarn", "dots1", "deepseek_v2")
MESHES = {
    "fsdp": {"fsdp": 8},
    "fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "context": {"data": 2, "fsdp": 1, "seq": 2, "tensor": 2},
}


def error(name, config, params, variables=None):
    """The largest difference of the logits, in their standard deviations."""
    model, (tokens, logits, std) = build(config), expected(name)
    variables = variables_of(name, config_of(name)) if variables is None else variables
    return np.abs(jax.jit(model.apply)(params, variables, tokens)[:, ::5] - logits).max() / std


def test_the_tables_of_the_docs_are_those_of_the_rows():
    page = families_table.PAGE.read_text()
    assert all(f"<!-- table: {name} -->" in page for name in families_table.TABLES)
    assert families_table.with_tables(page) == page


@pytest.mark.parametrize("name", NAMES)
def test_a_model_keeps_nothing_that_its_files_do_not_have(name):
    # An import leaves these as they are: counts of the last step.
    variables = jax.eval_shape(build(config_of(name)).init, jax.random.key(0))[1]
    assert all(jgt.path_text(path).endswith(("moe/load", ROUTER_BIAS)) for path, _ in jax.tree.leaves_with_path(variables))


def test_every_family_has_a_golden():
    assert {published(GOLDENS / name).config["model_type"] for name in NAMES} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    config = config_of(name)
    assert error(name, config, loaded(name, config)) < tolerance(name)


# What alternates in a tensor is read once for each of its two parameters.
@pytest.mark.parametrize("name", [n if n == "gpt_neox" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "gpt_oss"])
def test_each_byte_is_read_once(name, monkeypatch):
    reads, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: reads.append((at, sum(map(len, views)))) or real(file, views, at))
    loaded(name, config_of(name))
    variables_of(name, config_of(name))
    tensors = open_folder(GOLDENS / name).tensors.values()
    assert sum(size for _, size in reads) == sum(tensor.nbytes for tensor in tensors)
    ends = [at + size for at, size in sorted(reads)]
    assert all(end <= begin for end, (begin, _) in zip(ends, sorted(reads)[1:], strict=False))


@pytest.mark.parametrize("rules", ["fsdp_tensor", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fsdp", "context"))])
@pytest.mark.parametrize("name", [n if n == "gemma3" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_logits_are_the_same_from_shards(name, rules):
    if "experts" in published(GOLDENS / name).keys:
        pytest.skip("experts have rules of their own")
    if rules == "context" and "attention_softcap" in published(GOLDENS / name).keys:
        pytest.skip("attention with a soft cap is not split")
    config, mesh = config_of(name), jgt.make_mesh(MESHES[rules])
    read = jgt.load_rules(ROOT / "configs" / "rules" / f"{rules}.yaml")
    model, (tokens, _, _) = build(config), expected(name)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    whole = np.tile(tokens, (4, 1))
    placement = jgt.place(lambda params, tokens: model.apply(params, {}, tokens), read, mesh, shapes, whole, partial=True)
    params = loaded(name, config, placement.params)
    logits = jax.jit(jgt.shard(lambda params, tokens: model.apply(params, {}, tokens), read, mesh, partial=True))(params, whole)
    _, wanted, std = expected(name)
    assert np.abs(logits[:2, ::5] - wanted).max() < tolerance(name) * std


@pytest.mark.parametrize("name", ["ministral3", "dots1", "gpt_oss", "deepseek_v3", "qwen3_5"])
def test_documents_in_one_row_are_those_in_rows_of_their_own(name):
    config, (tokens, wanted, std) = config_of(name), expected(name)
    model, variables = build(config), variables_of(name, config)
    row, begins = np.concatenate([tokens[:1, :40], tokens[1:, :56]], axis=1), np.repeat([[0, 40]], [40, 56], axis=1)

    def packed(params, segments):
        return model.run(lambda module: module(row, segments), params, variables, False)[0]

    params = loaded(name, config)
    logits = jax.jit(packed)(params, jax.numpy.asarray(begins, np.int32))
    assert np.abs(logits[0, :40:5] - wanted[0, :8]).max() < tolerance(name) * std
    assert np.abs(logits[0, 40::5] - wanted[1, :12]).max() < tolerance(name) * std


def test_layers_behind_the_last_one_are_left_out_with_a_line(tmp_path):
    folder = open_folder(GOLDENS / "glm4_moe")
    tensors = {name: folder.read(name) for name in folder.tensors}
    tensors |= {f"model.layers.3.{name}.weight": np.ones(3, np.float32) for name in ("eh_proj", "enorm", "mlp.experts.0.up_proj")}
    config = json.loads((GOLDENS / "glm4_moe" / "config.json").read_text())
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    for number in (1, 0):
        values = {**config, "num_nextn_predict_layers": number}
        values.pop("num_mtp_layers", None)
        pieces = ((name, (), array) for name, array in tensors.items())
        path = tmp_path / str(number)
        write_folder(path, shapes, pieces, files={"config.json": json.dumps(values).encode()}, max_file_bytes=1 << 30)
    model = config_of("glm4_moe")
    wanted = jax.eval_shape(build(model).init, jax.random.key(0))[0]
    files = open_files(published(tmp_path / "1"), model, wanted)
    assert files.left_out == "3 tensors of other parts are left out (model.layers.3.)"
    with pytest.raises(jgt.InputError, match=r"model.layers.3.eh_proj.weight \[3\] is not part of the model"):
        open_files(published(tmp_path / "0"), model, wanted)


def ablations():
    """Each option of each family that differs from the default, and does not decide which parameters there are."""
    shaping = (
        "norm",
        "norm_place",
        "qk_norm",
        "biases",
        "gated",
        "parallel",
        "positions",
        "norm_eps",
        "full_layers",
        "attention_sinks",
        "latent",
        "pattern",
        "linear",
        "attention_gate",
    )
    for name in NAMES:
        keys = published(GOLDENS / name).keys
        # The divisors of longrope are as many as there are frequencies.
        fixed = (*shaping, "rope_share") if "rope_scaling" in keys else shaping
        yield from ((name, key) for key, value in keys.items() if key in DEFAULTS and key not in fixed and value != DEFAULTS[key])
        for part, inner in INNER.items():
            found, kind = keys.get(part) or {}, PARTS[part]
            # Two rotary frequencies are on both sides of any number of turns.
            counted = [key for key in inner if (name, key) != ("kimi_k2", "fast")]
            yield from ((name, f"{part}.{key}") for key in counted if found.get(key, getattr(kind, key)) != getattr(kind, key))


def without(config, key):
    """The config with the default of a key, or the other value of one whose default follows from others."""
    part, _, inner = key.partition(".")
    if inner:
        old = getattr(config, part)
        if inner == "normalized":
            return dataclasses.replace(config, experts=dataclasses.replace(old, normalized=not old.is_normalized))
        return dataclasses.replace(config, **{part: dataclasses.replace(old, **{inner: getattr(type(old), inner)})})
    return dataclasses.replace(config, **{key: DEFAULTS[key]} | ({"full_layers": (), "window_theta": None} if key == "window" else {}))


@pytest.mark.parametrize(("name", "key"), [pytest.param(*one, marks=() if one[0] in QUICK else pytest.mark.slow) for one in ablations()])
def test_without_an_option_logits_are_others(name, key):
    config = config_of(name)
    assert error(name, without(config, key), loaded(name, config)) > 1e-2


@pytest.mark.parametrize("name", ["dots1", "glm4_moe", "minimax_m2", "deepseek_v3"])
def test_without_the_bias_of_the_router_logits_are_others(name):
    zeros = jax.tree.map(jax.numpy.zeros_like, variables_of(name, config := config_of(name)))
    assert error(name, config, loaded(name, config), zeros) > 1e-2


def test_without_the_numbers_of_latent_attention_logits_are_others():
    latent = config_of("glm4_moe_lite").latent
    # The latents' norms have an epsilon of their own.
    other = config_of("glm4_moe_lite", latent={**dataclasses.asdict(latent), "norm_eps": config_of("glm4_moe_lite").norm_eps})
    assert error("glm4_moe_lite", other, loaded("glm4_moe_lite", other)) > 1e-2
    config = config_of("deepseek_v2")
    groups = dataclasses.replace(config.experts.groups, best=None)
    other = dataclasses.replace(config, experts=dataclasses.replace(config.experts, groups=groups))
    assert error("deepseek_v2", other, loaded("deepseek_v2", other)) > 1e-2


def test_without_a_part_of_its_experts_logits_are_others():
    params = loaded("qwen2_moe", config := config_of("qwen2_moe"))
    ungated = dataclasses.replace(config, experts=dataclasses.replace(config.experts, shared_gate=False))
    layers = params["layers"]
    moe = {name: part for name, part in layers["moe"].items() if name != "shared_gate"}
    assert error("qwen2_moe", ungated, {**params, "layers": {**layers, "moe": moe}}) > 1e-2
    alone = dataclasses.replace(ungated, experts=dataclasses.replace(ungated.experts, shared=0))
    moe = {name: part for name, part in moe.items() if name != "shared"}
    assert error("qwen2_moe", alone, {**params, "layers": {**layers, "moe": moe}}) > 1e-2


def _parts_of_gpt_oss():
    """The part of the parameters that each option makes, and a change of the options that leaves it out."""
    return {
        "sinks": {"attention_sinks": False},
        "expert_biases": {"biases": ("qkv", "out", "router")},
        "router": {"biases": ("qkv", "out", "experts")},
        "out": {"biases": ("qkv", "experts", "router")},
        "q_proj": {"biases": ("out", "experts", "router")},
    }


@pytest.mark.parametrize("part", _parts_of_gpt_oss())
def test_without_a_part_of_gpt_oss_logits_are_others(part):
    config, params = config_of("gpt_oss"), loaded("gpt_oss", config_of("gpt_oss"))
    other = dataclasses.replace(config, **_parts_of_gpt_oss()[part])
    wanted = jax.eval_shape(build(other).init, jax.random.key(0))[0]

    def kept(params, wanted):
        return {name: kept(params[name], inner) for name, inner in wanted.items()} if isinstance(wanted, dict) else params

    smaller = kept(params, wanted)
    assert jax.tree.structure(smaller) == jax.tree.structure(wanted) != jax.tree.structure(params)
    assert error("gpt_oss", other, smaller) > 1e-2


def test_without_the_bias_of_the_head_logits_are_others():
    params = loaded("phi", config := config_of("phi"))
    assert error("phi", config, {**params, "head_bias": 0 * params["head_bias"]}) > 1e-2


# -- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "lama"}, "model_type: 'lama' is not known. Did you mean 'llama'?"),
        ({"model_type": None}, "model_type: null is not known. Supported: llama, mistral"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rope_scaling: 'ntk' is not supported. Supported: default, linear",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "twist": 1}}, "rope_scaling: twist: 1: jgt does not know this key"),
        ({"hidden_act": "relu2"}, "hidden_act: 'relu2' is not supported. Supported: silu"),
        ({"num_sinks": 4}, "num_sinks: 4: jgt does not know this key, so the model could be another one"),
        ({"hidden_size": None}, "the key 'hidden_size' is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a number above 0, not 'two'"),
        ({"rope_scaling": 7}, "rope_scaling must be a mapping, not 7"),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(changes, problem, tmp_path):
    config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(jgt.InputError, match=re.escape(problem)):
        load({"model": {"hf": str(tmp_path)}})


LEAST = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
SOME_WINDOWS = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        # What transformers' classes take for an absent key is not what they take for null.
        ("mistral", {}, {"window": 4096, "full_layers": []}),
        ("mistral", {"sliding_window": None}, {"window": None}),
        ("mixtral", {}, {"rope_theta": 1e6, "norm_eps": 1e-5, "window": None}),
        ("phi3", {}, {"norm_eps": 1e-5, "window": None}),
        ("olmo2", {}, {"norm_eps": 1e-5, "rope_theta": 1e4}),
        ("olmo3", {}, {"norm_eps": 1e-5, "rope_theta": 5e5, "window": 4096, "full_layers": [3]}),
        ("cohere", {}, {"rope_theta": 5e5, "tied": True}),
        ("smollm3", {}, {"rope_theta": 2e6, "tied": True}),
        ("glm4", {}, {"norm_eps": 1.5625e-7}),
        ("gemma2", {}, {"attention_softcap": 50.0, "logits_softcap": 30.0}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": None, "logits_softcap": 30.0}),
        ("gemma3_text", {}, {"attention_softcap": None, "logits_softcap": None}),
        ("qwen2", {"use_sliding_window": True}, {"window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, {"window": None}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, {"window": 4096, "full_layers": [0, 1]}),
        # Each class reads its own key of the activation.
        ("gemma", {"hidden_act": "gelu"}, {"activation": "gelu_tanh"}),
        ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu"}, {"activation": "silu"}),
        ("gemma2", {"hidden_act": "silu", "hidden_activation": "gelu"}, {"activation": "gelu"}),
        ("gemma3_text", {"hidden_act": "silu"}, {"activation": "gelu_tanh"}),
        # These classes have a window in each layer, whatever their files say.
        ("mistral", SOME_WINDOWS, {"window": 8, "full_layers": []}),
        ("phi3", SOME_WINDOWS, {"window": 8, "full_layers": []}),
        ("mixtral", SOME_WINDOWS, {"window": 8, "full_layers": []}),
        ("starcoder2", SOME_WINDOWS, {"window": 8, "full_layers": []}),
        ("ministral", SOME_WINDOWS, {"window": 8, "full_layers": [0, 2]}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, {"window": 8, "full_layers": []}),
        # Only layers without a window are scaled.
        ("olmo3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"window_theta": 5e5, "rope_theta": 5e5}),
    ],
    ids=str,
)
def test_keys_mean_what_they_mean_to_the_class_of_the_family(family, changes, options):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    found = described_by({"model_type": family, **LEAST, **experts, **changes}, Path("config.json")).keys
    assert {name: found.get(name) for name in options} == options


def test_a_run_has_what_its_file_and_config_json_say():
    run = load({"model": {"hf": str(GOLDENS / "gemma2"), "seq": 64, "layers": 2}})
    model = run.config.model
    assert (model.seq, model.layers, model.logits_softcap, model.window) == (64, 2, 3.0, 8)
    assert run.where("model.window").endswith("gemma2/config.json:1")
    # The config of a run says everything, also without the folder.
    resolved = run.resolved()
    resolved["model"]["hf"] = "/gone"
    assert dataclasses.replace(load(resolved).config.model, hf=model.hf) == model


def test_a_key_that_contradicts_config_json_is_refused():
    with pytest.raises(jgt.InputError, match=r"model.layers: .*gemma2/config.json says 2. Leave the key out"):
        load({"model": {"hf": str(GOLDENS / "gemma2"), "layers": 4}})


def test_tensors_that_are_missing_or_have_another_shape_are_named(tmp_path):
    config = dataclasses.replace(config_of("llama"), ffn=64, layers=3)
    with pytest.raises(jgt.InputError) as caught:
        loaded("llama", config)
    text = str(caught.value)
    assert "the tensor model.layers.2.mlp.up_proj.weight [64, 32] is missing" in text
    assert "the tensor model.layers.0.mlp.up_proj.weight has the shape [48, 32], but the model needs [64, 32]" in text
    with pytest.raises(jgt.InputError, match=r"self_attn.q_proj.bias .* is not part of the model"):
        loaded("llama", dataclasses.replace(config_of("llama"), biases=()))
