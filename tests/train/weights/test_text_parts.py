"""The text parts of models that read images: config.json and files in each form, made from the golden folders of their families."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_models import GOLDENS, expected
from test_families import LEAST

import jgt
from jgt.document import Node, bind
from train.export.form import form_of
from train.models.config import ModelConfig
from train.models.decoder import build
from train.run.check import print_published
from train.weights.described import described_by, published
from train.weights.load import open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

PLACE = Path("config.json")
CONFIGS = Path(__file__).parents[2] / "goldens" / "configs"
VISION = {"image_token_id": 60, "video_token_id": 61, "vision_config": {"depth": 1}}
# The family, the golden folder, and the words for `model.` and before `lm_head`.
PARTS = {
    "gemma3": ("gemma3_text", "gemma3", "language_model.model.", "language_model."),
    "mistral3": ("ministral3", "ministral3", "model.language_model.", ""),
    "qwen2_5_vl": ("qwen2", "qwen2", "model.", ""),
    "qwen3_vl_moe": ("qwen3_moe", "qwen3_moe", "model.language_model.", ""),
}


def whole_config(kind, **changes):
    family, golden = PARTS[kind][:2]
    inner = json.loads((GOLDENS / golden / "config.json").read_text())
    inner |= {"model_type": family if kind in ("gemma3", "mistral3") else f"{kind}_text"}
    inner.pop("norm_topk_prob", None)
    return {"model_type": kind, "text_config": inner, **VISION, **changes}


def whole_folder(path, kind, others=("vision_tower.embed", "visual.blocks.0.norm"), **changes):
    """A folder of a whole model, whose text part has the tensors of the golden folder."""
    _, golden, decoder, head = PARTS[kind]
    folder = open_folder(GOLDENS / golden)
    tensors = {name: folder.read(name) for name in folder.tensors}
    if kind == "qwen3_vl_moe":
        tensors = dict(fused(tensors))
    tensors = {f"{decoder}{n[6:]}" if n.startswith("model.") else f"{head}{n}": array for n, array in tensors.items()}
    tensors |= {f"{name}.weight": np.ones(3, np.float32) for name in others}
    files = {"config.json": json.dumps(whole_config(kind, **changes)).encode()}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_folder(path, shapes, ((name, (), array) for name, array in tensors.items()), files=files, max_file_bytes=1 << 30)
    return path


def fused(tensors):
    """The matrices of all experts as one tensor [experts, in, out]."""
    yield from ((name, array) for name, array in tensors.items() if ".experts." not in name)
    for layer in range(2):
        first = f"model.layers.{layer}.mlp.experts"
        stacks = [np.stack([tensors[f"{first}.{e}.{name}_proj.weight"].T for e in range(8)]) for name in ("gate", "up", "down")]
        yield f"{first}.gate_up_proj", np.concatenate(stacks[:2], axis=-1)
        yield f"{first}.down_proj", stacks[2]


def opened(path):
    described = published(path)
    config = bind(Node.of({**described.keys, "seq": 96}, "config.json", "model"), ModelConfig, [])
    model = build(config)
    shapes, variables = jax.eval_shape(model.init, jax.random.key(0))
    return described, config, shapes, model, variables


@pytest.mark.parametrize("kind", PARTS)
def test_the_text_part_is_the_model_of_its_family(kind, tmp_path, capsys):
    described, config, shapes, model, variables = opened(whole_folder(tmp_path / "whole", kind))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    files = open_files(described, config, shapes)
    assert files.left_out == "2 tensors of other parts are left out (vision_tower., visual.)"
    params = files.load(shapes, jax.tree.map(lambda _: here, shapes))
    zeros = jax.tree.map(jax.numpy.zeros_like, variables)
    tokens, wanted, std = expected(PARTS[kind][1])
    logits = jax.jit(lambda p, t: model.apply(p, zeros, t))(params, tokens)
    assert np.abs(logits[:, ::5] - wanted).max() < 5e-5 * std
    print_published(described, config, shows_tensors=False)
    assert "2 tensors of other parts are left out" in capsys.readouterr().out


@pytest.mark.parametrize("kind", PARTS)
def test_it_is_exported_as_the_family(kind, tmp_path):
    family, golden = PARTS[kind][:2]
    _, config, shapes, _, _ = opened(whole_folder(tmp_path / "whole", kind))
    form = form_of(dataclasses.replace(config, hf=str(tmp_path / "whole")), tmp_path, None, str)
    again = described_by(form.config, PLACE)
    assert (form.config["model_type"], again.keys) == (family, published(tmp_path / "whole").keys)
    assert form.config["architectures"] == published(GOLDENS / golden).config["architectures"]
    assert "vision_config" not in form.config
    flat = {jgt.path_text(path): x.shape for path, x in jax.tree.leaves_with_path(shapes)}
    theirs = open_files(published(GOLDENS / golden), config, shapes).sources
    assert form.sources(flat) == theirs


def test_a_tensor_that_is_of_no_part_is_refused(tmp_path):
    described, config, shapes, _, _ = opened(whole_folder(tmp_path / "whole", "mistral3", others=("audio_tower.embed",)))
    with pytest.raises(jgt.InputError, match=r"audio_tower.embed.weight \[3\] is not part of the model that config.json describes"):
        open_files(described, config, shapes)


def keys_of(kind, inner, **outer):
    return described_by({"model_type": kind, "text_config": inner, **outer}, PLACE).keys


def test_keys_mean_what_they_mean_to_the_class_of_the_part():
    least = {**LEAST, "num_key_value_heads": 4}
    assert keys_of("gemma3", {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64})["vocab"] == 262_208
    assert keys_of("qwen3_vl", least)["rope_theta"] == 5e5
    assert keys_of("qwen3_vl", least)["head_dim"] == 128
    assert keys_of("qwen2_5_vl", least)["norm_eps"] == 1e-5
    sections = {"rope_type": "default", "rope_theta": 7e5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    assert keys_of("qwen3_vl", {**least, "rope_parameters": sections})["rope_theta"] == 7e5
    # The keys of old files are beside those of the other parts.
    flat = {"model_type": "qwen2_vl", **least, **VISION, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "rope_theta": 9e5}
    assert described_by(flat, PLACE).keys == keys_of("qwen2_vl", {**least, "rope_theta": 9e5})
    # The tie of the whole counts.
    assert keys_of("qwen3_vl", {**least, "tie_word_embeddings": False}, tie_word_embeddings=True)["tied"] is True
    assert keys_of("qwen3_vl", {**least, "tie_word_embeddings": True})["tied"] is True
    assert keys_of("qwen3_vl", {**least, "tie_word_embeddings": True}, tie_word_embeddings=False)["tied"] is False


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"text_config": {"model_type": "gemma4_text"}},
            "text_config: model_type: 'gemma4_text' is not supported. Supported: mistral, mini",
        ),
        ({"text_config": 7}, "text_config must be a mapping, not 7"),
        ({"text_config": {"model_type": 7}}, "text_config: model_type must be a text, not 7"),
        ({"rope_theta": 5e5}, "rope_theta: 500000.0: jgt does not know this key"),
        ({"text_config": {**LEAST, "twist": 1}}, "twist: 1: jgt does not know this key"),
        ({"text_config": {}}, "the key 'hidden_size' is missing"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"text_config": {**LEAST, "rope_scaling": 7}}, "rope_scaling must be a mapping, not 7"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(changes, problem):
    with pytest.raises(jgt.InputError, match=re.escape(problem)):
        described_by({"model_type": "mistral3", "text_config": LEAST, **VISION, **changes}, PLACE)


def test_a_part_that_divides_scores_always_is_refused_where_its_file_says_otherwise():
    with pytest.raises(jgt.InputError, match="norm_topk_prob: false is not supported"):
        keys_of("qwen3_vl_moe", {**LEAST, "norm_topk_prob": False})
