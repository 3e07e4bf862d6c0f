"""`jgt.load`: the model of a folder of Hugging Face, or of a run whose data is gone, on any mesh, with its logits and its tokenizer."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jgt
from train.data.tokenizer import ByteTokenizer
from train.run.train import train

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"
LAYOUTS = {"one device": {}, "2 x 2 x 2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": "jgt:fsdp_tensor"}}


def golden(name):
    """tokens [2, 96], logits at each fifth of them, and the largest difference that rounding makes."""
    with np.load(GOLDENS / name / "expected.npz") as file:
        return file["tokens"], file["logits"], 5e-5 * float(file["std"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_logits_of_a_published_model(name, layout):
    tokens, logits, bound = golden(name)
    loaded = jgt.load(f"hf:{GOLDENS / name}", **LAYOUTS[layout])
    assert loaded.tokenizer is None and loaded.ends and loaded.step == 0 and loaded.config.vocab == 64
    assert loaded.setup.mesh.size == (1 if layout == "one device" else 8)
    # Three rows, which four groups of devices do not divide.
    found = loaded.logits(np.concatenate([tokens, tokens[:1]]))
    assert found.shape == (3, 96, 64)
    assert np.abs(found[:2, ::5] - logits).max() < bound


def test_a_published_model_in_a_bucket_is_that_of_its_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens, logits, bound = golden("llama3")
    loaded = jgt.load(f"hf:file://{GOLDENS}/llama3")
    assert np.abs(loaded.logits(tokens)[:, ::5] - logits).max() < bound and str(loaded.config.hf).startswith(str(tmp_path))
    with pytest.raises(jgt.InputError, match=r"file:///.*: is not a folder of Hugging Face: config.json is missing"):
        jgt.load(f"file://{tmp_path}")


@pytest.mark.slow
def test_experts_of_a_published_model_are_loaded():
    tokens, logits, bound = golden("qwen3_moe")
    # Without hf:, and with a shorter sequence than the file's.
    loaded = jgt.load(GOLDENS / "qwen3_moe", ["model.seq=96"])
    assert np.abs(loaded.logits(tokens)[:, ::5] - logits).max() < bound
    with pytest.raises(ValueError, match=r"the shape \[1, 97\].*at most model.seq 96"):
        loaded.logits(np.zeros((1, 97), int))


def test_a_run_is_loaded_onto_any_mesh_without_its_data(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It is the same model on every mesh. " * 200)
    run = tiny("data.source=text", f"data.path={text}", "train.steps=1")
    train(run)
    text.unlink()
    alone = jgt.load(tmp_path / "run")
    assert isinstance(alone.tokenizer, ByteTokenizer)
    tokens = [alone.tokenizer.encode("It is the same")]
    # The names of rules that the model has not belong to a larger program.
    rules = {"axes": {"batch": ["data"]}, "signals": {"embed": {"params": {"embedding": ["tensor", None]}}}, "default": "replicate"}
    rules["signals"]["cache"] = {"params": {"k_cache": ["tensor", ...]}}
    file = tmp_path / "run" / "config.yaml"
    damaged = file.read_text().replace("rope_theta: 10000.0", "rope_theta: 18000.0")
    spread = jgt.load(tmp_path / "run", mesh={"data": 4, "tensor": 2}, rules=jgt.make_rules(rules))
    assert spread.params["embed"]["embedding"].sharding.spec == jax.P("tensor", None)
    np.testing.assert_allclose(alone.logits(tokens), spread.logits(tokens), atol=1e-5)
    file.write_text(damaged)
    with pytest.raises(jgt.InputError, match=r"model.rope_theta: is 18000.0, but .*/1 was saved with 10000.0. Restore the file, or set "):
        jgt.load(tmp_path / "run")
    again = jgt.load(tmp_path / "run", "model.rope_theta=1e4")
    np.testing.assert_array_equal(alone.logits(tokens), again.logits(tokens))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(jgt.InputError, match=r"is not a run directory .*config.yaml, and no folder of Hugging Face, .*config.json"):
        jgt.load(tmp_path)
    with pytest.raises(jgt.InputError, match=r"config.json: .*No such file"):
        jgt.load(f"hf:{tmp_path}")
    shutil.copy(GOLDENS / "llama" / "config.json", tmp_path)
    with pytest.raises(jgt.InputError, match="safetensors"):
        jgt.load(f"hf:{tmp_path}")
    with pytest.raises(jgt.InputError, match=r"Add rules, for example"):
        jgt.load(GOLDENS / "llama", mesh={"data": 4, "tensor": 2})
    with pytest.raises(jgt.InputError, match="the mesh has no axis 'fsdp'"):
        jgt.load(GOLDENS / "llama", mesh={"data": 8}, rules="jgt:fsdp")
    with pytest.raises(TypeError, match="mesh must be the sizes of its axes"):
        jgt.load(GOLDENS / "llama", mesh=jgt.make_mesh({"data": 8}))
