"""`jgt init DIR` writes a project whose model and rules work as they are."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgt
from jgt import document
from jgt.__main__ import main

ROOT = Path(__file__).parents[2]
FILES = ["README.md", "model.py", "rules.yaml", "run.yaml"]


@pytest.fixture
def project(tmp_path, capsys):
    """A new project."""
    assert main(["init", str(tmp_path / "my-model")]) == 0
    assert f"    jgt train {tmp_path}/my-model/run.yaml --code {tmp_path}/my-model/model.py\n" in capsys.readouterr().out
    return tmp_path / "my-model"


def test_the_files(project):
    assert sorted(path.name for path in project.iterdir() if path.is_file()) == FILES
    assert (project / "run.yaml").read_text().startswith("# yaml-language-server: $schema=schema/run.json\n")
    assert (project / "rules.yaml").read_text().startswith("# yaml-language-server: $schema=schema/rules.json\n")
    for name in ("run.json", "rules.json"):
        assert (project / "schema" / name).read_text() == (ROOT / "configs" / "schema" / name).read_text()
    assert document.read(project / "run.yaml").plain()["run"] == {"name": "my-model"}
    assert (project / "model.py").read_text() == (ROOT / "configs" / "project" / "model.py").read_text()


def test_a_folder_whose_name_would_need_quotes(tmp_path):
    assert main(["init", str(tmp_path / "a, b: {c}")]) == 0
    assert document.read(tmp_path / "a, b: {c}" / "run.yaml").plain()["run"] == {"name": "project"}


def test_files_that_exist_stay(tmp_path, capsys):
    (tmp_path / "model.py").write_text("mine")
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    said = "exists. Name another folder, or move the file away"
    assert capsys.readouterr().err == f"{tmp_path}/run.yaml: {said}\n{tmp_path}/model.py: {said}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py", "run.yaml"]
    assert (tmp_path / "model.py").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.endswith("cannot be written: Not a directory\n")


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """XLA's code generator is not under test."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model_class():
    """The class Model of the shipped model.py."""
    spec = importlib.util.spec_from_file_location("projects_model", ROOT / "configs" / "project" / "model.py")
    module = importlib.util.module_from_spec(spec)
    # nnx looks the module of a class up.
    sys.modules["projects_model"] = module
    spec.loader.exec_module(module)
    yield module.Model
    del sys.modules["projects_model"]


SIZES = {"vocab": 32, "width": 64, "depth": 2}


@pytest.fixture(scope="module")
def program(model_class):
    """Parameters, a batch, and the loss of the model in f32."""
    graph, params = nnx.split(model_class(**SIZES, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 32)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    return params, {"tokens": tokens}, loss


def test_the_model_maps_tokens_to_logits_and_sees_no_later_token(model_class):
    model = model_class(**SIZES, dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((2, 8), jnp.int32)
    graph, params = nnx.split(model)
    logits_of = jax.jit(lambda tokens: nnx.merge(graph, params)(tokens))
    logits = logits_of(tokens)
    assert (logits.shape, logits.dtype) == ((2, 8, 32), jnp.float32)
    changed = logits_of(tokens.at[:, 5].set(3))
    assert np.array_equal(logits[:, :5], changed[:, :5]) and not np.array_equal(logits[:, 5:], changed[:, 5:])


PIPELINE = {"signal": "layers", "axis": "stage", "schedule": "1f1b", "microbatches": 4}


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, None, id="2x2x2"),
        pytest.param({"data": 1, "fsdp": 2, "stage": 2, "tensor": 2}, PIPELINE, id="stages", marks=pytest.mark.slow),
    ],
)
def test_the_rules_change_no_loss_and_no_gradient(program, project, mesh, pipeline):
    params, batch, loss = program
    rules, mesh = jgt.load_rules(project / "rules.yaml"), jgt.make_mesh(mesh)
    sharded = jgt.shard(loss, rules, mesh, pipeline=pipeline and jgt.Pipeline(**pipeline))
    expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(params, batch)
    found, gradient = jax.jit(jax.value_and_grad(sharded))(params, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradient, expected_gradient)


def test_every_matrix_is_split(program, project):
    params, batch, loss = program
    mesh = jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    places = jgt.place(loss, jgt.load_rules(project / "rules.yaml"), mesh, params, batch).parameters
    split = {place.path for place in places if any(place.dims)}
    assert split == {place.path for place in places if not place.path.endswith("/scale")}


@pytest.mark.slow
def test_the_project_trains(tmp_path):
    environment = {"PYTHONPATH": str(ROOT)}
    for command in (["init", "x"], ["train", "x/run.yaml", "--code", "x/model.py", "train.steps=3"]):
        done = subprocess.run([sys.executable, "-m", "jgt", *command], cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "x" / "metrics.jsonl").exists()
