"""Sizes that the mesh does not divide, and parameters that are stored like their optimizer state: the numbers of one device, anywhere."""

import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import saved

from jgt.document import InputError
from train.config import load
from train.data.opening import open_data
from train.records.console import describe_storage
from train.run.restored import restore_state
from train.setup import prepare
from train.setup.feed import Feed

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs" / "rules"
# No axis of more than one device divides the vocabulary.
TINY = (
    "run.dir=unused",
    "devices.virtual_cpu=null",
    "model.layers=2",
    "model.embed=48",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=62",
    "model.vocab=257",
    "model.seq=16",
    "data.source=text",
    "data.eval_tokens=0",
    "checkpoint.every=1",
    "train.batch=24",
)


def on(rules, *more, **sizes):
    """Overrides: these rules on a mesh of these sizes."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
    return ("rules=" + (str(RULES / f"{rules}.yaml") if rules else "null"), f"mesh={{{mesh}}}", *more)


ONE = on(None, data=1)
PIPELINE = "pipeline={signal: layers, axis: stage, schedule: 1f1b, microbatches: 2}"
MESHES = {
    "tensor x fsdp": on("fsdp_tensor", data=1, fsdp=2, tensor=4),
    "zero1 on 3": on("zero1", data=3),
}
MORE = {
    "pipeline": on("pipeline", PIPELINE, data=1, fsdp=2, stage=2, tensor=2),
    "zero1 on 7": on("zero1", "train.batch=14", data=7),
    "zero1 on 6, in parts": on("zero1", "train.accumulate=2", data=6),
    "fsdp on 5": on("fsdp", "train.batch=10", fsdp=5),
    "muon on 5": on("fsdp_tensor", "optimizer.name=muon", "train.batch=10", data=1, fsdp=5, tensor=1),
    "muon, zero1 on 7": on("zero1", "optimizer.name=muon", "train.batch=14", data=7),
    "tensor 3 x data 2": on("tensor", "model.heads=3", "model.kv_heads=3", data=2, tensor=3),
    "fsdp_tensor with remat": on("fsdp_tensor", "train.remat=block", data=1, fsdp=2, tensor=4),
    "pipeline of chunks": on(
        "pipeline", PIPELINE.replace("1f1b", "interleaved, virtual: 2"), "model.layers=4", data=2, fsdp=1, stage=2, tensor=2
    ),
}


def maker(text_file):
    """From overrides to a tiny run, set up on the first devices."""

    @cache
    def made(*overrides):
        run = load(ROOT / "configs" / "quickstart.yaml", [f"data.path={text_file}", *TINY, *overrides])
        return prepare(run, devices=jax.devices()[: int(np.prod(list(run.mesh.values())))])

    return made


@pytest.fixture(scope="module")
def made(text_file):
    return maker(text_file)


def first_steps(setup):
    """Losses and norms of three steps."""
    config = setup.run.config
    data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused"))
    state, step = setup.init(), setup.compile_train_step()
    found = []
    for count, batch in enumerate(islice(Feed(data, setup).train(0), 3), 1):
        state, metrics = step(state, batch, setup.settings(count))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found)


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_losses_and_norms_are_those_of_one_device(made, name):
    overrides = (MESHES | MORE)[name]
    alone = [text for text in overrides if text.startswith(("model.", "optimizer.", "train.batch"))]
    np.testing.assert_allclose(first_steps(made(*overrides)), first_steps(made(*ONE, *alone)), rtol=2e-5)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_parameters_stored_like_their_state_make_the_same_steps(made, dtype):
    """They are read in bf16 in any case, so only the sums of gradients over devices differ."""
    more = (f"model.dtype={dtype}", "model.vocab=256", "model.ffn=64")
    found, expected = (first_steps(made(*on(rules, *more, data=8))) for rules in ("zero1", "replicated"))
    np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == "f32" else 1e-3)


def test_a_checkpoint_has_the_model_s_shapes_and_its_bits_everywhere(made, tmp_path):
    setups = [made("train.ema=0.9", *overrides) for overrides in (*MESHES.values(), MORE["pipeline"], ONE)]
    for number, setup in enumerate(setups):
        # Moments that are not zero, but with padding that is.
        state = setup.from_saved(jax.tree.map(lambda x: x + 1, setup.to_save(setup.init())))
        found = saved(setup, state, tmp_path / str(number))
        expected = jax.device_get(setup.to_save(state))
        assert [x.shape for x in jax.tree.leaves(expected)] == [x.shape for x in jax.tree.leaves(setups[-1].shapes)]
        other = setups[number - 1]
        restored = restore_state(other, found)
        assert [x.shape for x in jax.tree.leaves(restored)] == [x.shape for x in jax.tree.leaves(other.shapes)]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_save(restored)), expected)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.model_params(restored.params)), expected.params)


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_the_config_for_gpus_fits_any_number_of_them(count):
    setup = prepare(load(ROOT / "configs" / "gpu.yaml", [f"train.batch={count * 8}"]), num_devices=count)
    size = sum(p.bytes_per_device(setup.mesh) for p in setup.storage.placement.parameters)
    # All but the norms, which are whole everywhere.
    assert size < 1.01 * 4 * setup.num_parameters / count + 4 * 768 * 25


def test_refused_where_the_file_says_so(made):
    with pytest.raises(InputError, match=r"size 257, which tensor=4 x fsdp=2 \(= 8\) does not divide. A size of 256 or 264 would fit"):
        made(*MESHES["tensor x fsdp"], "train.uneven=refuse")


def test_the_start_says_what_is_padded(made, capsys):
    lines = list(describe_storage(made(*MESHES["tensor x fsdp"]).storage))
    assert "embed/embedding [257, 48] is stored as [264, 48], because its axes do not divide it: 2.7% more, all zero" in lines
    (line,) = [line for line in describe_storage(made(*MESHES["zero1 on 3"]).storage) if "like their" in line]
    assert line == "12 parameters are stored like their optimizer state between steps, and gathered at the start of each"


@pytest.mark.slow
def test_zero_over_48_devices(text_file):
    """In a process of its own, which has 48 devices."""
    code = f"""
import sys
import jax
import numpy as np
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "helpers")!r}, {str(Path(__file__).parent)!r}]
jax.config.update("jax_num_cpu_devices", 48)
jax.config.update("jax_platforms", "cpu")
import test_odd_sizes as t
made = t.maker({str(text_file)!r})
found, one = (t.first_steps(made(*overrides, "train.batch=48")) for overrides in (t.on("zero1", data=48), t.ONE))
np.testing.assert_allclose(found, one, rtol=2e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
