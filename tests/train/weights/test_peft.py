"""Adapters of PEFT in both directions: the same function, the same tensors, and what jgt's adapters do not have is refused by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_models import config_of

import jgt
from jgt import path_text
from jgt.document import InputError, Node
from train.checkpoint.saved import find_checkpoint
from train.commands import generate
from train.commands.published import export
from train.config import load
from train.models.decoder import build
from train.run.train import train
from train.weights.adapt.adapters import factors_of
from train.weights.adapt.config import LoraConfig
from train.weights.adapters import CONFIG, FACTOR, TENSORS, read_peft, with_adapter
from train.weights.described import published
from train.weights.factors import Site, check_factors, load_factors
from train.weights.names import Structure, sources_of
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

GOLDENS = Path(__file__).parents[2] / "goldens"
ADAPTERS, MODELS = GOLDENS / "adapters", GOLDENS / "weights"
SECTIONS = {
    "llama": {"rank": 4, "alpha": 8, "modules": ["mlp/down", "attn/q_proj", "attn/v_proj"], "dropout": 0.1, "stabilized": False},
    # One layer of two.
    "qwen3": {"rank": 3, "alpha": 7, "modules": ["mlp/gate_proj", "mlp/up_proj", "attn/k_proj", "attn/out"]},
    # Ranks and factors that differ, three modules in a tensor and two in another.
    "phi3": {"rank": 4, "alpha": 6, "stabilized": True},
    "gpt2": {"rank": 2, "alpha": 4, "modules": ["attn/q_proj", "attn/k_proj", "attn/v_proj", "mlp/down"]},
    "gpt_neox": {"rank": 2, "alpha": 4, "modules": ["attn/q_proj", "attn/k_proj", "attn/v_proj"]},
}
SOME = "model.layers.0.self_attn.q_proj"
REFERENCE = os.environ.get("JGT_REFERENCE", sys.executable)
"""The Python that has PEFT."""


def sites_of(model, section):
    """The sites of the matrices that a section adapts."""
    config = config_of(model)
    shapes = {path_text(p): x.shape for p, x in jax.tree.leaves_with_path(jax.eval_shape(build(config).init, jax.random.key(0))[0])}
    sources = sources_of(published(MODELS / model).family, shapes, Structure.of(config))
    paths = [path for path in shapes if path.removeprefix("layers/").removesuffix("/kernel") in section["modules"]]
    return {factors_of(path): Site.of(sources[path], path, shapes[path]) for path in paths}


def read(model, folder):
    """The factors of an adapter by the paths of A and B, with their sites and scale."""
    peft = read_peft(folder)
    section = peft.section(published(MODELS / model).family)
    config, sites = LoraConfig(**{**section, "modules": tuple(section["modules"])}), sites_of(model, section)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    check_factors(peft, sites)
    flat = load_factors(peft, sites, config.scale, dict.fromkeys([path for pair in sites for path in pair], here))
    return sites, {path: np.asarray(x) for path, x in flat.items()}, config.scale


@pytest.mark.parametrize("name", SECTIONS)
def test_the_factors_of_each_matrix_are_those_of_its_module(name):
    folder = open_folder(ADAPTERS / name, single=TENSORS)
    said, (sites, factors, scale) = json.loads((ADAPTERS / name / CONFIG).read_text()), read(name, ADAPTERS / name)
    assert len(sites) > 1
    for (of_a, of_b), site in sites.items():
        for place, module in site.modules():
            made = scale * factors[of_a][place].astype(np.float64) @ factors[of_b][place]
            if FACTOR.format(module=module, factor="A") not in folder.tensors:
                assert name == "qwen3" and ".layers.0." in module and not made.any()
                continue
            a, b = (folder.read(FACTOR.format(module=module, factor=factor)).astype(np.float64) for factor in "AB")
            inner = module.split(".")[-1]
            rank, alpha = said["rank_pattern"].get(inner, said["r"]), said["alpha_pattern"].get(inner, said["lora_alpha"])
            update = (alpha / (rank**0.5 if said["use_rslora"] else rank)) * (b @ a).T[:, list(site.outputs)]
            np.testing.assert_allclose(made, update, rtol=0, atol=1e-6 * np.abs(update).max())


@pytest.mark.parametrize("name", SECTIONS)
def test_the_section_of_a_run_has_what_the_folder_says(name):
    model, adapter = str(MODELS / name), str(ADAPTERS / name)
    root = with_adapter(Node.of({"model": {"hf": model}, "lora": {"hf": adapter, "dropout": 0.5}}, "run.yaml"))
    section = root.find("lora").plain()
    assert {**section, **SECTIONS[name], "hf": adapter, "dropout": 0.5} == section
    assert with_adapter(root) == root
    with pytest.raises(InputError, match=r"run.yaml: lora.rank: .*says \d+. Leave the key out"):
        with_adapter(Node.of({"model": {"hf": model}, "lora": {"hf": adapter, "rank": 99}}, "run.yaml"))
    with pytest.raises(InputError, match=r"lora.hf: is an adapter of a published model. Name the model's folder: model.hf"):
        with_adapter(Node.of({"lora": {"hf": adapter}}, "run.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_the_logits_of_an_adapter_are_those_of_peft(name):
    expected = np.load(ADAPTERS / name / "expected.npz")
    loaded = jgt.load(MODELS / name, [f"lora.hf={ADAPTERS / name}"])
    difference = np.abs(loaded.logits(expected["tokens"]) - expected["logits"]).max()
    assert difference < 5e-5 * expected["logits"].std()


# -- folders from strangers ---------------------------------------------------------------------------------------


def change(**values):
    return lambda config, tensors: config.update(values)


def rename(old, new):
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def replace(name, shape):
    return lambda config, tensors: tensors.update({name: np.zeros(shape, np.float32)})


A, B = (FACTOR.format(module=SOME, factor=factor) for factor in "AB")
FORGED = {
    "dora": (change(use_dora=True), "adapter_config.json: use_dora: true: jgt's adapters do not have this"),
    "bias": (change(bias="lora_only"), "adapter_config.json: bias: 'lora_only' is not supported. Supported: 'none'"),
    "saved modules": (change(modules_to_save=["lm_head"]), r"adapter_config.json: modules_to_save: \['lm_head'\]: jgt's adapters"),
    "unknown key": (change(new_arithmetic="x"), "adapter_config.json: new_arithmetic: 'x': jgt's adapters do not have this"),
    "tokens": (change(trainable_token_indices=[1]), r"adapter_config.json: trainable_token_indices: \[1\]"),
    "pissa": (change(init_lora_weights="pissa"), "adapter_config.json: init_lora_weights: 'pissa' may change the weights"),
    "other method": (change(peft_type="LOHA"), "adapter_config.json: peft_type: 'LOHA' is not supported. Supported: 'LORA'"),
    "rank": (change(r=5), f"adapter_model.safetensors: {SOME}: the rank of its tensors is 4, but adapter_config.json says 5"),
    "rank pattern": (change(rank_pattern={"q_proj": 2}), f"{SOME}: the rank of its tensors is 4, but adapter_config.json says 2"),
    "pattern": (change(rank_pattern={".*(a+)+b": 4}), r"adapter_config.json: rank_pattern: '\.\*\(a\+\)\+b' is a pattern"),
    "rank text": (change(r="many"), "adapter_config.json: r must be a number above 0, not 'many'"),
    "alpha": (change(lora_alpha=-1), "adapter_config.json: lora_alpha must be a number above 0, not -1"),
    "half": (rename(B, A.replace("q_proj", "k_proj")), f"{A}: {B} is missing"),
    "embedding": (
        rename(A, "base_model.model.model.embed_tokens.lora_embedding_A"),
        "embed_tokens.lora_embedding_A': is not a factor of a module",
    ),
    "whole module": (rename(A, "base_model.model.lm_head.weight"), "base_model.model.lm_head.weight': is not a factor of a module"),
    "vector": (replace(A, (4,)), rf"{A}: has the shape \[4\], but a factor is a matrix"),
    "scalar": (replace(A, ()), rf"{A}: has the shape \[\], but a factor is a matrix"),
    "ranks": (replace(A, (3, 32)), f"{A}: has 3 rows, but {B} 4 columns. Both are the rank"),
    "experts": (
        rename(A, A.replace("self_attn.q_proj", "mlp.experts.up")),
        f"{FACTOR.format(module='model.layers.0.mlp.experts.up', factor='B')} is missing",
    ),
}


def forged(folder, changes, model="llama"):
    """A copy of an adapter, changed."""
    config = json.loads((ADAPTERS / model / CONFIG).read_text())
    opened = open_folder(ADAPTERS / model, single=TENSORS)
    tensors = {name: opened.read(name) for name in opened.tensors}
    changes(config, tensors)
    kinds = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    files = {CONFIG: json.dumps(config).encode()}
    write_folder(folder, kinds, ((name, (), x) for name, x in tensors.items()), files=files, max_file_bytes=10**9, single=TENSORS)
    return folder


@pytest.mark.parametrize("case", FORGED)
def test_what_changes_the_function_is_refused_by_its_name(case, tmp_path):
    changes, problem = FORGED[case]
    with pytest.raises(InputError, match=problem):
        read_peft(forged(tmp_path / "adapter", changes))


def test_all_problems_are_reported_at_once(tmp_path):
    def changes(config, tensors):
        for name in ("dora", "bias", "half"):
            FORGED[name][0](config, tensors)

    with pytest.raises(InputError) as raised:
        read_peft(forged(tmp_path / "adapter", changes))
    assert [word for word in ("use_dora", "bias", "is missing") if word in str(raised.value)] == ["use_dora", "bias", "is missing"]


def broken(folder, name, content):
    """A copy of an adapter in which a file has other contents, or is gone."""
    shutil.copytree(ADAPTERS / "llama", folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("content", [None, b"", b"\x00" * 9, b"\xff" * 40, b'{"r": 1, "r": 2}', b"[" * 10_000], ids=str)
def test_damaged_files_are_named(name, content, tmp_path):
    with pytest.raises(InputError, match=f"adapter/{name}: "):
        read_peft(broken(tmp_path / "adapter", name, content))


def test_a_link_that_leads_out_is_refused(tmp_path):
    folder = broken(tmp_path / "adapter", TENSORS, None)
    (folder / TENSORS).symlink_to(ADAPTERS / "llama" / TENSORS)
    with pytest.raises(InputError, match="outside of the folder, and is not read"):
        read_peft(folder)


def test_adapters_of_other_models_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"transformer.h.0.attn.c_attn: is not a module of the model that jgt can adapt. Known are .*q_proj"
    ):
        read("llama", ADAPTERS / "gpt2")
    wider = forged(tmp_path / "wider", replace(A, (4, 48)))
    with pytest.raises(InputError, match=rf"{SOME}: A has the shape \[4, 48\], but the model needs \[4, 32\]. Is it an adapter of another"):
        read("llama", wider)
    whole = forged(tmp_path / "whole", lambda _, x: x.update({A: np.zeros((4, 32), np.int32)}))
    with pytest.raises(InputError, match=rf"{A}: has the type int32, not F16, BF16, F32, F64"):
        read("llama", whole)
    deeper = forged(tmp_path / "deeper", lambda _, x: x.update({n.replace(".0.", ".7."): x[n] for n in (A, B)}))
    with pytest.raises(InputError, match=r"model.layers.7.self_attn.q_proj: the model has no such matrix"):
        read("llama", deeper)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused_as_they_are_read(value, tmp_path):
    folder = forged(tmp_path / "adapter", lambda _, tensors: tensors[B].__setitem__((1, 2), value))
    with pytest.raises(InputError, match=rf"{TENSORS}: {B}: has NaN or infinite numbers"):
        read("llama", folder)


def test_the_command_refuses_with_code_2(tmp_path, capsys):
    folder = forged(tmp_path / "adapter", change(use_dora=True))
    assert generate.main([str(MODELS / "llama"), "--adapter", str(folder), "--prompt", "a"]) == 2
    assert "adapter_config.json: use_dora" in capsys.readouterr().err
    assert generate.main([str(tmp_path), "--adapter", str(folder), "--prompt", "a"]) == 2
    assert "is not a run directory or a checkpoint in one" in capsys.readouterr().err


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run that trains an adapter of a golden model."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 64, 8000, np.uint16))

    def made(name, *overrides, **lora):
        sections = {
            "run": {"dir": str(tmp_path / "run")},
            "mesh": {"data": 1},
            "model": {"hf": str(MODELS / name), "seq": 96 if name == "gpt2" else 32},
            "data": {"source": "tokens", "path": str(tmp_path / "tokens.npy"), "eval_tokens": 0},
            "lora": lora,
            "optimizer": {"lr": 0.05, "schedule": "constant"},
            "train": {"batch": 8, "steps": 4},
        }
        return load(sections, overrides)

    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"rank": 3, "alpha": 7, "modules": ["{q,v}_proj", "down"]}),
        ("phi3", {"rank": 3, "alpha": 7, "modules": ["{q,v}_proj", "out", "{gate,up}_proj"], "stabilized": True}),
        ("gpt2", {"rank": 2, "alpha": 8}),
        ("gpt_neox", {"rank": 2, "alpha": 8}),
        ("gemma2", {"rank": 2, "alpha": 8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_adapter_is_exported_merged_and_read_again(name, lora, run, tmp_path, capsys):
    train(run(name, **lora))
    out = {form: tmp_path / form for form in ("merge", "adapter")}
    assert export([str(tmp_path / "run"), str(tmp_path / "none")]) == 2
    assert "--merge writes the model with the adapter added, --adapter the adapter alone" in capsys.readouterr().err
    assert [export([str(tmp_path / "run"), str(folder), f"--{form}"]) for form, folder in out.items()] == [0, 0]
    tokens = np.random.default_rng(1).integers(3, 64, (2, 32))
    ours, base = (np.asarray(jgt.load(folder).logits(tokens)) for folder in (tmp_path / "run", MODELS / name))
    allowed = 2e-5 * ours.std()
    assert np.abs(ours - base).max() > 1000 * allowed
    assert np.abs(jgt.load(out["merge"]).logits(tokens) - ours).max() < allowed
    again = jgt.load(MODELS / name, [f"lora.hf={out['adapter']}"])
    assert np.abs(again.logits(tokens) - ours).max() < allowed
    # Checkpoints have the adapter and its moments alone.
    arrays = find_checkpoint(tmp_path / "run")[0].manifest.arrays
    assert all("lora_" in entry.path for entry in arrays if len(entry.shape) > 1)
    if subprocess.run([REFERENCE, "-I", "-c", "import torch, peft"], capture_output=True).returncode:
        return
    np.save(tmp_path / "asked.npy", tokens)
    script = Path(__file__).with_name("make_adapters.py")
    subprocess.run(
        [REFERENCE, script, "logits", MODELS / name, out["adapter"], tmp_path / "asked.npy", tmp_path / "theirs.npy"], check=True
    )
    assert np.abs(np.load(tmp_path / "theirs.npy") - ours).max() < 5e-5 * ours.std()


@pytest.mark.slow
def test_a_run_continues_an_adapter_and_other_weights_are_refused(run, tmp_path):
    train(run("llama", rank=3, alpha=7))
    assert export([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    lora = {"hf": str(tmp_path / "adapter")}
    train(run("llama", f"run.dir={tmp_path / 'next'}", "optimizer.lr=1e-30", "train.steps=1", **lora))
    before, after = (jgt.load(tmp_path / name).params for name in ("run", "next"))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # Whoever uses the run needs the folder of the adapter no more.
    shutil.rmtree(tmp_path / "adapter")
    jgt.load(tmp_path / "next")


@pytest.mark.slow
def test_an_adapter_of_jgt_is_refused_for_other_weights(run, tmp_path):
    train(run("llama", "train.steps=1", rank=3, alpha=7))
    assert export([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    shutil.copytree(MODELS / "llama", tmp_path / "other")
    place = open_folder(tmp_path / "other").tensors["lm_head.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.offset + place.nbytes // 2)
        file.write(b"\x01\x02")
    with pytest.raises(InputError, match=r"jgt_base.json: the adapter was trained on other weights than those in .*other"):
        jgt.load(tmp_path / "other", [f"lora.hf={tmp_path / 'adapter'}"])


@pytest.mark.slow
def test_what_is_trained_beside_an_adapter_is_merged_alone(run, tmp_path, capsys):
    train(run("llama", "optimizer.train=[norm/scale]", "train.steps=1", rank=3, alpha=7))
    assert export([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "norm/scale: is trained, too, and is not a part of an adapter. jgt export RUN OUT --merge" in capsys.readouterr().err
    assert export([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
