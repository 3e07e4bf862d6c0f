"""Runs with frozen parameters from start to end: resumed, moved to other meshes, begun from other weights, and models of the user's own."""

import contextlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from jgt import path_text
from jgt.document import InputError
from train.config import load
from train.run.directory.identity import check_places, read_resume
from train.run.start import Start
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare

TRAIN = "optimizer.train=[layers/attn/**]"
FSDP = ("rules=jgt:fsdp", "mesh={fsdp: 8}")
STAGES = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 4}", "pipeline={signal: layers, microbatches: 4}")
PUBLISHED = Path(__file__).parents[2] / "goldens" / "weights" / "qwen3"


def flat(tree):
    return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def assert_same(one, other):
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for path, x in one.items():
        assert x.dtype == other[path].dtype, path
        np.testing.assert_array_equal(x, other[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), FSDP, STAGES], ids=["alone", "fsdp", "stages"])
def test_a_run_that_was_killed_ends_with_the_same_bits(tiny, tmp_path, stopped_at, layout):
    overrides = (TRAIN, "model.base_dtype=bf16", "train.ema=0.9", "train.steps=4", "checkpoint.every=2", *layout)
    with stopped_at(3):
        train(tiny(*overrides))
    train(tiny(*overrides))
    train(tiny(*overrides, f"run.dir={tmp_path / 'whole'}"))
    for more in ([], ["train.ema=null"]):
        assert_same(jgt.load(tmp_path / "run", more).params, jgt.load(tmp_path / "whole", more).params)
    first = prepare(tiny(*overrides)).init()
    last = flat(jgt.load(tmp_path / "run").params)
    assert {path for path, x in flat(first.frozen).items() if x.dtype == jnp.bfloat16} == {p for p in last if "/attn/" not in p}
    assert "layers/attn/out/kernel" in last and last["layers/attn/out/kernel"].dtype == np.float32


@pytest.mark.slow
def test_a_checkpoint_resumes_on_any_mesh_and_with_replicas(tiny, tmp_path):
    train(tiny(TRAIN, "train.steps=2", *FSDP))
    before = jgt.load(tmp_path / "run").params
    replicas = ("sync={axis: replica, every: 2}", "rules=jgt:hybrid", "mesh={replica: 2, fsdp: 4}")
    for number, layout in enumerate([STAGES, replicas, ()]):
        moved = tmp_path / f"moved{number}"
        shutil.copytree(tmp_path / "run", moved)
        train(tiny(TRAIN, "train.steps=4", f"run.dir={moved}", *layout))
        after = jgt.load(moved).params
        for path, x in flat(after).items():
            assert (x == flat(before)[path]).all() != ("/attn/" in path), path


def test_a_run_whose_patterns_have_changed_does_not_resume(tiny, tmp_path):
    train(tiny("train.steps=1"))
    with pytest.raises(InputError, match=r"optimizer\.train: is .*but .* was started with null.*--allow-change optimizer\.train"):
        check_places(tiny(TRAIN), read_resume("auto", [], tmp_path / "run"))


@pytest.mark.slow
def test_weights_come_from_runs_that_froze_others(tiny, tmp_path):
    train(tiny(TRAIN, "model.base_dtype=bf16", "train.steps=1"))
    half = jgt.load(tmp_path / "run").params
    train(
        tiny(
            "train.steps=1",
            f"run.dir={tmp_path / 'all'}",
            f"checkpoint.weights={tmp_path / 'run'}",
            "checkpoint.cast=true",
            "optimizer.lr=1e-30",
        )
    )
    whole = jgt.load(tmp_path / "all").params
    assert_same(whole, jax.tree.map(lambda x: x.astype(jnp.float32), half))
    others = ("optimizer.train=[embedding]", "model.base_dtype=bf16", "checkpoint.cast=true", "optimizer.lr=1e-30", *FSDP)
    train(tiny("train.steps=1", f"run.dir={tmp_path / 'other'}", f"checkpoint.weights={tmp_path / 'run'}", *others))
    for path, x in flat(jgt.load(tmp_path / "other").params).items():
        np.testing.assert_array_equal(x, flat(half)[path].astype(x.dtype), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), FSDP], ids=["alone", "fsdp"])
def test_published_weights_are_read_in_the_base_type(tiny_file, tmp_path, layout):
    folder = tmp_path / "published"
    shutil.copytree(PUBLISHED, folder)
    overrides = [f"model.hf={folder}", f"run.dir={tmp_path / 'run'}", "train.batch=8"]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"mesh": {"data": 1}, "model": {"seq": 32}, "data": {"source": "stdlib"}}))

    def fresh(*more):
        setup = prepare(load(file, [*overrides, *layout, *more]))
        start = Start(setup, {}, lambda *_, **__: contextlib.nullcontext(), lambda text: None)
        return setup.model_params(setup.last_params(start.fresh().state))

    wide, half = flat(fresh()), flat(fresh("optimizer.train=[layers/attn/**]", "model.base_dtype=bf16"))
    for path, x in half.items():
        assert x.dtype == (np.float32 if "/attn/" in path else jnp.bfloat16), path
        np.testing.assert_array_equal(x, wide[path].astype(x.dtype), err_msg=path)


OWN = """
import jax.numpy as jnp
from flax import linen as nn, nnx

class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.norm, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))

class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="last")(nn.Dense(16, name="first")(x))

def data():
    return [{"x": jnp.full(8, n / 8), "y": jnp.float32(n)} for n in range(16)]

def loss(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

def sgd(learning_rate):
    import optax
    return optax.sgd(learning_rate, 0.9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Nnx", "Linen"])
def test_a_model_of_the_users_own_trains_its_last_layer(tmp_path, kind):
    (tmp_path / "own_model.py").write_text(OWN)
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"kind": f"own_model:{kind}", "base_dtype": "bf16"},
        "data": {"source": "own_model:data"},
        "optimizer": {"name": "own_model:sgd", "train": ["last/*"], "lr": 0.01},
        "train": {"loss": "own_model:loss", "batch": 8, "steps": 3},
        "mesh": {"data": 8},
    }
    run = load(sections, code=read_code([tmp_path]))
    first = prepare(run).init()
    train(run)
    last = jgt.load(tmp_path / "run", code=tmp_path).params
    for path, x in flat(last).items():
        if path.startswith("last/"):
            assert x.dtype == np.float32 and (x != flat(first.params)[path]).any()
        else:
            np.testing.assert_array_equal(x, flat(first.frozen)[path])
            assert x.dtype == jnp.bfloat16
    assert {path.rpartition("/trace/")[2] for path in flat(first.opt_state) if "trace" in path} == {"last/kernel", "last/bias"}
