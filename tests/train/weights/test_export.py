"""Exports: tensors are those of the import from any mesh, config.json describes the model, and what nothing can say is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import variables_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_four_bits import in_four_bits

import jgt
from jgt.document import InputError, Node, bind
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.pieces import pieces
from train.checkpoint.restore import restore_params
from train.checkpoint.saved import SavedStep, UnusableError
from train.checkpoint.steps import Steps
from train.commands.published import export
from train.config import load
from train.export import exports
from train.export.form import form_of, own_form
from train.export.model import SavedModel
from train.export.write import write_export
from train.models.config import ModelConfig
from train.models.decoder import build
from train.run.load import load_model
from train.run.train import train
from train.step.state import State
from train.weights.described import published
from train.weights.describing import described_as_family, differences
from train.weights.families.families import FAMILIES
from train.weights.load import open_files
from train.weights.origin import ORIGIN, check_kept, keep_origin
from train.weights.safetensors import open_folder

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
# Tensors that are fused by head, and experts, also with first layers of another kind, biases of routers, and parts that alternate.
TELLING = ("gpt_neox", "qwen3_moe", "dots1", "gpt_oss")
MESHES = {"rows": ((2, 4), ("a",), (None, None, "a", "b")), "columns": ((4, 2), ("b",), (None, None, "b", "a"))}
"""The sizes of the axes a and b, and the axes that split vectors and other arrays."""


def where(key):
    return f"run.yaml:7 ({key})"


def config_of(name, **changes):
    problems = []
    config = bind(Node.of({**published(GOLDENS / name).keys, "seq": 96, "hf": None, **changes}, name, "model"), ModelConfig, problems)
    assert not problems
    return config


def laid_out(x, mesh):
    """A sharding for an array on some devices."""
    sizes, vectors, others = MESHES[mesh]
    devices = Mesh(np.array(jax.devices()).reshape(sizes), ("a", "b"))
    spec = vectors if x.ndim == 1 else others[-x.ndim :]
    fits = [axis if axis and size % devices.shape[axis] == 0 else None for axis, size in zip(spec, x.shape, strict=False)]
    return NamedSharding(devices, PartitionSpec(*fits))


def params_of(name, config, mesh):
    """The parameters of a golden folder, laid out on some devices."""
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    return open_files(published(GOLDENS / name), config, shapes).load(shapes, jax.tree.map(lambda x: laid_out(x, mesh), shapes))


def random_params(config):
    shapes, rng = jax.eval_shape(build(config).init, jax.random.key(0))[0], np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape, np.float32)), shapes)


def saved_step(folder, params, **more):
    """A checkpoint with these parameters."""
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(State(jnp.zeros((), jnp.int32), params, {"count": jnp.zeros(1)}, **more), 1, 1)
    checkpoints.close()
    return SavedStep(folder=folder / "1", manifest=Steps(folder).read(1))


def saved_arrays(folder, step):
    """All arrays of a checkpoint, by path."""
    saved = SavedStep(folder=folder / str(step), manifest=Steps(folder).read(step))
    return {entry.path: next(pieces(saved, entry, whole=range(len(entry.shape))))[1] for entry in saved.manifest.arrays}


def equal(one, other, without=()):
    """Whether two folders have the same tensors. without: what the names of tensors have that only the first one has."""
    before, after = open_folder(one), open_folder(other)
    kept = [tensor for tensor in before.tensors if not any(part in tensor for part in without)]
    assert {*kept} == {*after.tensors}
    for tensor in kept:
        np.testing.assert_array_equal(before.read(tensor), after.read(tensor))


@pytest.mark.parametrize("name", [n if n in TELLING else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_an_export_has_the_tensors_of_the_import_from_any_mesh(name, tmp_path):
    config = config_of(name, hf=str(GOLDENS / name))
    form, params = form_of(config, tmp_path, None, where), params_of(name, config, "rows")
    for mesh in ("rows", "columns"):
        saved = saved_step(tmp_path / f"{mesh}.checkpoints", params, variables=variables_of(name, config))
        write_export(form, SavedModel.of(saved), tmp_path / mesh, dtype="bf16", max_file_bytes=20_000)
        equal(GOLDENS / name, tmp_path / mesh, without=[".indexer."])
        shapes, shardings = (jax.tree.map(pick, params) for pick in (jax.typeof, lambda x: laid_out(x, "columns")))
        params = restore_params(saved, shapes, shardings)
    assert published(tmp_path / "rows").keys == published(GOLDENS / name).keys
    assert form.config["architectures"] == [form.family.architecture]


def test_each_family_is_found_by_its_options():
    for name in NAMES:
        found, config = described_as_family(config_of(name), where), config_of(name)
        # These are the same model with other names of keys.
        same = {"kimi_k2": "deepseek_v3", "glm4_moe_lite": "deepseek_v3", "qwen3_5_moe": "qwen3_next"}
        first = same.get(name) or published(GOLDENS / name).config["model_type"]
        assert found.config["model_type"] == first
        assert found.config["architectures"] == [FAMILIES[first].architecture]
        assert differences(config, found) == {}


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"seq": 9000, "activation": "gelu", "experts": None}, "llama"),
        ({"window": 8}, "mistral"),
        ({"window": 8, "full_layers": [1]}, "ministral"),
        ({"biases": ["qkv"], "window": 8, "full_layers": [1]}, "qwen2"),
        ({"experts": {"count": 4, "balance": "batch", "ffn": 24, "z_loss": 0.1}}, "mixtral"),
        ({"experts": {"count": 4, "balance": "none"}, "qk_norm": "head", "window": 8}, "qwen3_moe"),
        ({"embed_scale": 3.0}, "granite"),
        ({"rope_share": 0.5}, "phi3"),
        ({"kind": "gpt", "tied": False}, "gpt2"),
        # The classes of Llama and of Gemma 2 refuse such a width, and that of Gemma 2 such a scale.
        ({"embed": 36, "heads": 8, "head_dim": 8}, "mistral"),
    ],
    ids=str,
)
def test_a_model_that_began_from_nothing_has_a_family(changes, family):
    problems = []
    config = bind(Node.of({"layers": 2, **changes}, "run.yaml", "model"), ModelConfig, problems)
    assert not problems
    found = described_as_family(config, where)
    assert found.config["model_type"] == family
    # transformers' Mistral has a window in all of its layers.
    assert family != "mistral" or "layer_types" not in found.config


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"window": 8, "qk_norm": "all", "norm": "layer"},
            r"run.yaml:7 \(model.qk_norm\): model.qk_norm: 'all': no family .* would have null",
        ),
        ({"experts": {"count": 4, "balance": "bias"}}, r"model.experts.balance: 'bias': .*mixtral would have 'batch'"),
        ({"rope_share": 0.5, "biases": ["qkv"]}, r"model.rope_share: 0.5: no family of published models .* qwen2 would have 1.0"),
        ({"gated": False}, r"model.gated: false: no family"),
        # The class of Phi-3 knows no such scaling.
        ({"rope_share": 0.5, "rope_scaling": {"kind": "linear", "factor": 2.0}}, r"model.rope_share: 0.5: no family"),
    ],
    ids=str,
)
def test_what_no_family_can_say_is_refused(changes, problem):
    config = bind(Node.of({"layers": 2, **changes}, "run.yaml", "model"), ModelConfig, [])
    with pytest.raises(jgt.InputError, match=problem):
        described_as_family(config, where)


def test_a_model_that_began_from_nothing_is_read_again(tmp_path):
    config = ModelConfig(layers=2, embed=32, heads=4, kv_heads=2, ffn=48, vocab=64, seq=96, rope_theta=5e5, tied=True)
    params = random_params(config)
    form = form_of(config, tmp_path, None, where)
    write_export(form, SavedModel.of(saved_step(tmp_path / "checkpoints", params)), tmp_path / "out", dtype="f32", max_file_bytes=10**9)
    found = published(tmp_path / "out")
    again = bind(Node.of(dict(found.keys), "config.json", "model"), ModelConfig, [])
    shapes = jax.eval_shape(build(again).init, jax.random.key(0))[0]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    read = open_files(found, again, shapes).load(shapes, jax.tree.map(lambda _: here, shapes))
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_keys_that_were_changed_after_the_import_are_refused(tmp_path):
    config = dataclasses.replace(config_of("gemma2", hf=str(GOLDENS / "gemma2")), logits_softcap=7.0)
    with pytest.raises(jgt.InputError, match=r"model.logits_softcap: 7.0: .*gemma2/config.json says 3.0, so the model cannot be exported"):
        form_of(config, tmp_path, None, where)


# -- arrays of a checkpoint ---------------------------------------------------------------------------------------


def test_pieces_are_the_array_and_small(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    value = np.arange(3 * 10 * 12, dtype=np.float32).reshape(3, 10, 12)
    saved = saved_step(tmp_path, {"x": jax.device_put(value, NamedSharding(mesh, PartitionSpec(None, "a", "b")))})
    entry = next(entry for entry in saved.manifest.arrays if entry.path == "params/x")
    for most in (1, 400, 800, 10_000):
        made, count = np.full_like(value, np.nan), 0
        for place, part in pieces(saved, entry, most=most):
            assert part.nbytes <= max(most, 4 * 3 * 5 * 3) and np.isnan(made[place]).all()
            made[place], count = part, count + 1
        np.testing.assert_array_equal(made, value)
        assert count == {1: 8, 400: 4, 800: 2, 10_000: 1}[most]
    assert next(pieces(saved, entry, whole=(0, 1)))[1].shape[:2] == (3, 10)
    with pytest.raises(UnusableError, match=r"has other arrays in its files than its manifest lists \(params/x\)"):
        next(pieces(saved, dataclasses.replace(entry, shape=(3, 12, 10))))
    with pytest.raises(UnusableError, match="cannot be read"):
        next(pieces(saved, dataclasses.replace(entry, path="params/y")))


def test_the_average_over_replicas_is_exported(tmp_path):
    config = ModelConfig(layers=2, embed=16, heads=2, ffn=32, vocab=32, seq=8)
    params = random_params(config)
    average = jax.tree.map(lambda x: jnp.stack([x, x + 2]), params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    saved = saved_step(tmp_path / "checkpoints", jax.tree.map(lambda x: jnp.stack([x, x]), zeros), average=average, anchor=zeros)
    write_export(form_of(config, tmp_path, None, where), SavedModel.of(saved), tmp_path / "out", dtype="f32", max_file_bytes=10**9)
    np.testing.assert_allclose(open_folder(tmp_path / "out").read("model.norm.weight"), params["norm"]["scale"] + 1, rtol=1e-6)


# -- models of one's own ------------------------------------------------------------------------------------------


class Own:
    @staticmethod
    def hugging_face(keys):
        tensors = {"embed/table": "embed.weight", "layers/mlp/kernel": "layers.{l}.mlp.weight", "layers/mlp/bias": "layers.{l}.mlp.bias"}
        return {"model_type": "own", "width": keys["width"]}, tensors


OWN = {"embed/table": (5, 4), "layers/mlp/kernel": (3, 4, 6), "layers/mlp/bias": (3, 6)}


def test_a_model_of_ones_own_names_its_tensors(tmp_path):
    values = {path: np.random.default_rng(0).random(shape, np.float32) for path, shape in OWN.items()}
    mlp = {"kernel": values["layers/mlp/kernel"], "bias": values["layers/mlp/bias"]}
    saved = saved_step(
        tmp_path / "checkpoints", jax.tree.map(jnp.asarray, {"embed": {"table": values["embed/table"]}, "layers": {"mlp": mlp}})
    )
    form = own_form(Own, {"width": 4}, OWN, "my:Own", where)
    assert write_export(form, SavedModel.of(saved), tmp_path / "out", dtype="f32", max_file_bytes=10**9) == 7
    found = open_folder(tmp_path / "out")
    np.testing.assert_array_equal(found.read("embed.weight"), values["embed/table"])
    np.testing.assert_array_equal(found.read("layers.2.mlp.weight"), mlp["kernel"][2].T)
    np.testing.assert_array_equal(found.read("layers.1.mlp.bias"), mlp["bias"][1])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "own", "width": 4, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "my:Own cannot be exported: it does not say its tensors. Give it a static method hugging_face(keys) with"),
        (lambda keys: 3, "hugging_face must return a pair with the contents of config.json and a dict"),
        (lambda keys: ({}, {"embed/table": "a"}), "hugging_face has no tensor for the parameter layers/mlp/bias [3, 6]"),
        (lambda keys: ({}, {"embed/tabel": "a"}), "hugging_face names embed/tabel, which is not a parameter of the model"),
        (
            lambda keys: ({}, dict.fromkeys(OWN, "{l}.{e}.x")),
            "layers/mlp/bias [3, 6] has no dim beside those that its tensor's name counts",
        ),
    ],
)
def test_a_map_that_does_not_fit_is_refused(answer, problem):
    model = type("Own", (), {} if answer is None else {"hugging_face": staticmethod(answer)})
    with pytest.raises(jgt.InputError, match=re.escape(problem)):
        own_form(model, {}, OWN, "my:Own", where)


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that began from a published model, which is gone, and exported while it trained."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(GOLDENS / "qwen3", folder / "hf")
    (folder / "hf" / "generation_config.json").write_text('{"eos_token_id": 2}')
    start(folder)
    shutil.move(folder / "hf", folder / "gone")
    return folder


def start(folder, *overrides):
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 64, 4000, np.uint16))
    config = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": str(folder / "hf"), "seq": 16},
        "mesh": {"data": 1},
        "data": {"source": "tokens", "path": str(folder / "tokens.npy"), "eval_tokens": 0},
        "train": {"steps": 3, "batch": 8},
        "checkpoint": {"keep": 1, "export": {"every": 2, "path": str(folder / "exports"), "dtype": "bf16"}},
    }
    return train(load(config, overrides))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_exports_while_it_trains(trained, tmp_path):
    assert names(trained / "exports") == ["2", "3"]
    assert names(trained / "run" / "origin") == ["config.json", "generation_config.json", "origin.json"]
    events = [json.loads(line) for line in (trained / "run" / "events.jsonl").read_text().splitlines()]
    assert sorted(event["step"] for event in events if event["phase"] == "export") == [2, 3]
    # The folder of the model is gone.
    assert export([str(trained / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    equal(trained / "exports" / "3", tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 2}'
    assert published(tmp_path / "out").keys == published(GOLDENS / "qwen3").keys


def test_the_step_of_an_export_is_chosen(trained, tmp_path, capsys):
    run = trained / "run"
    assert export([str(run), str(tmp_path / "out"), "--step", "1"]) == 2
    assert "--step 1: " in (told := capsys.readouterr().err) and "has no checkpoint of this step. It has: 3" in told
    assert export([str(run / "checkpoints" / "3"), str(tmp_path / "out"), "--max-file", "0.02MB"]) == 0
    assert len(names(tmp_path / "out")) > 4
    assert export([str(run), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_writes_the_exports_that_are_missing(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "again")
    folder = tmp_path / "again"
    shutil.move(folder / "gone", folder / "hf")
    before = (folder / "exports" / "2").stat().st_mtime_ns
    shutil.rmtree(folder / "exports" / "3")
    # What a killed process leaves.
    (folder / "exports" / "3.writing").mkdir()
    start(folder)
    assert names(folder / "exports") == ["2", "3"]
    assert (folder / "exports" / "2").stat().st_mtime_ns == before
    equal(trained / "exports" / "3", folder / "exports" / "3")
    with pytest.raises(jgt.InputError, match=r"checkpoint.export.path: has .*exports/\d already. Name another folder"):
        start(folder, f"run.dir={tmp_path / 'other'}")


def test_an_export_is_the_model_of_its_checkpoint(tmp_path, capsys):
    """Also if the run goes back to an earlier step, another run names the folder, or the export is damaged."""
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "hf")
    every = ("checkpoint={every: 1, keep: 9, export: {every: 1, path: %s}}" % (tmp_path / "exports"),)
    start(tmp_path, *every)
    kept = (tmp_path / "exports" / "1" / "model.safetensors").stat().st_mtime_ns
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    (tmp_path / "exports" / "3" / "export.json").unlink()
    (tmp_path / "exports" / "2024").mkdir()
    start(tmp_path, *every, "optimizer.lr=0.1")
    told = capsys.readouterr().err
    assert "exports/2 is of a later step than 1, from which the run goes on. It is removed" in told
    # Without its stamp it may be anybody's.
    assert "exports/3 is of a later step than 1, from which the run goes on. It is renamed to 3.broken" in told
    assert names(tmp_path / "exports") == ["1", "2", "2024", "3", "3.broken"]
    assert (tmp_path / "exports" / "1" / "model.safetensors").stat().st_mtime_ns == kept

    def check():
        for step in ("1", "2", "3"):
            assert export([str(tmp_path / "run" / "checkpoints" / step), str(tmp_path / "out")]) == 0
            equal(tmp_path / "exports" / step, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")

    check()
    for step, name in ((1, "model.safetensors"), (2, "config.json"), (3, "export.json")):
        file = tmp_path / "exports" / str(step) / name
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
    start(tmp_path, *every, "optimizer.lr=0.1")
    assert capsys.readouterr().err.count("of this run, or is damaged. It is re") == 3
    check()
    start(tmp_path, "train.steps=1", "checkpoint.export=null", f"run.dir={tmp_path / 'other'}")
    with pytest.raises(jgt.InputError, match=r"has .*exports/\d already\. Name another folder, .* It is another run's"):
        start(tmp_path, *every, f"run.dir={tmp_path / 'other'}")


@pytest.mark.parametrize("path", ["", "/", "."])
def test_a_path_that_is_no_folder_of_its_own_is_refused(path):
    with pytest.raises(jgt.InputError, match=r"checkpoint\.export\.path: '.*' names no folder of its own\. Name one, such as exports"):
        load({}, [f"checkpoint.export={{path: '{path}'}}"])


@pytest.mark.slow
def test_an_export_that_fails_ends_nothing_but_the_last_one(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained / "gone", tmp_path / "hf")
    failing = {1, 3}
    plain = exports.write_export

    def write(form, model, *arguments, **options):
        if model.saved.manifest.step in failing:
            raise OSError(28, "No space left on device")
        return plain(form, model, *arguments, **options)

    monkeypatch.setattr(exports, "write_export", write)
    with pytest.raises(exports.ExportError, match=r"step 3 could not be exported: .*No space left.* the same command tries again"):
        start(tmp_path, "checkpoint.export.every=1")
    assert names(tmp_path / "exports") == ["2"]
    assert "the model of step 1 could not be exported" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["phase"] == "export_failed"] == [1, 3]
    failing.clear()
    start(tmp_path)
    assert names(tmp_path / "exports") == ["2", "3"]


@pytest.mark.slow
def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(1000, np.uint16))
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"layers": 2, "embed": 32, "seq": 16, "qk_norm": "all", "window": 4},
        "data": {"source": "tokens", "path": str(tmp_path / "tokens.npy"), "eval_tokens": 0},
        "checkpoint": {"export": {"path": str(tmp_path / "exports")}},
    }
    with pytest.raises(jgt.InputError, match="no family of published models has this"):
        train(load(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "origin.json"])
@pytest.mark.parametrize("change", ["a bit", "removed"])
def test_a_file_that_a_run_kept_and_that_has_changed_since_is_refused(name, change, tmp_path):
    published, run = tmp_path / "published", tmp_path / "run"
    published.mkdir()
    run.mkdir()
    for each in ("config.json", "tokenizer.json"):
        (published / each).write_text('{"size": 4}')
    keep_origin(run, str(published), None)
    check_kept(run / ORIGIN)
    (run / ORIGIN / "odd").symlink_to(published)
    with pytest.raises(InputError, match="origin: odd is a link"):
        check_kept(run / ORIGIN)
    (run / ORIGIN / "odd").unlink()
    file = run / ORIGIN / name
    if change == "removed":
        file.unlink()
    else:
        file.write_text(file.read_text().replace("4", "5", 1))
    if (name, change) == ("origin.json", "removed"):
        check_kept(run / ORIGIN)  # A run of an earlier version has no list.
        return
    with pytest.raises(InputError, match=f"origin/{name}: differs from what the run kept"):
        check_kept(run / ORIGIN)


def test_the_biases_of_routers_are_trained_on_from_those_of_the_files(tmp_path):
    shutil.copytree(GOLDENS / "dots1", tmp_path / "hf")
    # The parameters of the experts are in the folder alone, the biases in the checkpoint.
    start(tmp_path, "optimizer.train=['layers/attn/**', 'norm/**']")
    before, after = (open_folder(folder) for folder in (GOLDENS / "dots1", tmp_path / "exports" / "3"))
    names = [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)]
    moves = np.stack([after.read(name).astype(np.float32) - before.read(name).astype(np.float32) for name in names]) / 1e-3
    assert np.abs(moves).max() >= 1 and np.abs(moves).max() <= 3.1
    np.testing.assert_allclose(moves, np.round(moves), rtol=0, atol=1e-3)
    np.testing.assert_array_equal(saved_arrays(tmp_path / "run" / "checkpoints", 3)["variables/layers/moe/bias"], [*map(after.read, names)])
    np.testing.assert_array_equal(after.read(UP := "model.layers.1.mlp.experts.3.up_proj.weight"), before.read(UP))
    # The model of the run has these values, and the exported model has the same.
    for place in (tmp_path / "run", tmp_path / "exports" / "3"):
        found = load_model(place).variables["layers"]["moe"]["bias"]
        np.testing.assert_array_equal(found, [*map(after.read, names)])


@pytest.mark.slow
def test_frozen_experts_in_four_bits_are_exported_as_their_products(tmp_path):
    four, plain = in_four_bits(tmp_path / "made")
    shutil.copytree(four, tmp_path / "hf")
    start(tmp_path, "optimizer.train=['layers/attn/**']", "checkpoint.export.dtype=f32")
    before, after = open_folder(plain), open_folder(tmp_path / "exports" / "3")
    assert before.tensors.keys() == after.tensors.keys()
    for name in after.tensors:
        is_equal = np.array_equal(after.read(name), before.read(name))
        assert is_equal != (".self_attn." in name), name
    assert "quantization_config" not in json.loads((tmp_path / "exports" / "3" / "config.json").read_text())
    logits = [load_model(place).logits(np.array([[3, 4, 5, 6]])) for place in (tmp_path / "run", tmp_path / "exports" / "3")]
    np.testing.assert_array_equal(*logits)
