"""Frozen matrices in four or eight bits (`model.base_dtype`): on every mesh, in checkpoints, from published weights, in exports."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adapters import FSDP, LORA, MORE, THREE, batch, differentiated, flat, moved, prepared

import jgt
from jgt import Packing
from jgt.document import InputError
from train.checkpoint.saved import find_checkpoint
from train.commands.published import export
from train.config import load
from train.run.train import train

WIDE = ("model.embed=64", "model.ffn=128", "model.heads=4", "model.kv_heads=4", "model.head_dim=32")
NF4 = (*WIDE, LORA, "model.base_dtype=nf4")


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.6), ("int8", 1.1)])
def test_frozen_matrices_are_packed_and_the_loss_is_that_of_their_numbers(tiny_file, kind, most):
    setup = prepared(tiny_file, *NF4, f"model.base_dtype={kind}")
    state = setup.init()
    frozen, adapters = flat(state.frozen), setup.program.adapters
    assert {path for path, x in frozen.items() if x.dtype == np.uint8} == {*adapters.matrices} and len(adapters.matrices) == 7
    assert {x.dtype.name for x in frozen.values()} == {"uint8", "bfloat16"}
    plain = prepared(tiny_file, *NF4, "model.base_dtype=f32")
    matrices = {path: x for path, x in flat(plain.init().frozen).items() if path in adapters.packed}
    assert sum(frozen[path].nbytes for path in matrices) <= most * sum(x.size for x in matrices.values())
    assert (setup.num_parameters, setup.num_frozen) == (plain.num_parameters, plain.num_frozen)
    params = moved(setup.last_params(state))
    numbers = setup.program.model.merged(params)
    placed = jax.device_put(batch(), setup.batch_shardings)
    value = jax.jit(lambda p: setup.objective.loss(p, state.variables, placed)[0])(params)
    of_base = jax.jit(lambda p: plain.program.adapters.base.apply(p, {}, placed["inputs"]))(numbers)
    logits = jax.jit(lambda p: setup.program.model.apply(p, {}, placed["inputs"]))(params)
    np.testing.assert_allclose(logits, of_base, atol=2e-5)
    nats = jax.nn.logsumexp(of_base, -1) - jnp.take_along_axis(of_base, placed["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(value, jnp.sum(placed["weights"] * nats), rtol=1e-5)


@pytest.mark.parametrize("layout", [THREE, *(pytest.param(one, marks=pytest.mark.slow) for one in (FSDP, *MORE[1:3], *MORE[4:]))])
def test_gradients_are_the_same_on_every_mesh(tiny_file, layout):
    value, gradient = differentiated(prepared(tiny_file, *NF4, "mesh={data: 1}", "rules=null"))
    other, sharded = differentiated(prepared(tiny_file, *NF4, *layout))
    np.testing.assert_allclose(other, value, rtol=1e-6)
    assert gradient.keys() == sharded.keys() and len(gradient) == 14
    for path, x in gradient.items():
        np.testing.assert_allclose(sharded[path], x, rtol=0, atol=1e-5 * np.max(np.abs(x)), err_msg=path)


@pytest.mark.slow
def test_experts_are_packed(tiny_file):
    experts = ("model.experts={count: 4, choose: 2}", 'lora={rank: 4, modules: ["{q,k,v}_proj", "experts/*"]}', *NF4[:-2])
    experts = (*experts, "model.base_dtype=nf4")
    value, gradient = differentiated(prepared(tiny_file, *experts))
    setup = prepared(tiny_file, *experts, "rules=jgt:experts", "mesh={data: 2, fsdp: 1, expert: 4}")
    assert any("experts" in path for path in setup.program.adapters.packed)
    other, sharded = differentiated(setup)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    for path, x in gradient.items():
        np.testing.assert_allclose(sharded[path], x, rtol=0, atol=1e-5 * np.max(np.abs(x)), err_msg=path)


@pytest.mark.slow
def test_a_packed_run_begins_at_another_run_and_resumes_with_the_same_bits(tiny, tmp_path, stopped_at):
    train(tiny("train.steps=3", f"run.dir={tmp_path / 'base'}", *WIDE))
    overrides = (
        *NF4,
        "train.steps=4",
        "checkpoint.every=2",
        f"checkpoint.weights={tmp_path / 'base'}",
        "optimizer.lr=0.03",
        "checkpoint.cast=true",
    )
    with stopped_at(3):
        train(tiny(*overrides))
    train(tiny(*overrides))
    train(tiny(*overrides, f"run.dir={tmp_path / 'whole'}"))
    base, run, whole = (jgt.load(tmp_path / name) for name in ("base", "run", "whole"))
    last, first = flat(run.params), flat(base.params)
    for path, x in flat(whole.params).items():
        np.testing.assert_array_equal(last[path], x, err_msg=path)
    kernel = "layers/attn/q_proj/kernel"
    np.testing.assert_array_equal(last[kernel], np.asarray(Packing("nf4").pack(first[kernel])))
    np.testing.assert_allclose(run.model(np.arange(16)[None]), run.logits(np.arange(16)[None]), atol=2e-5)


@pytest.fixture(scope="module")
def published(tiny_file, tmp_path_factory):
    """The folder of a published model whose matrices have whole blocks."""
    folder = tmp_path_factory.mktemp("published")
    train(load(tiny_file, [*WIDE, "train.steps=1", f"run.dir={folder / 'run'}"]))
    export([str(folder / "run"), str(folder / "model")])
    return folder / "model"


@pytest.mark.parametrize("layout", [THREE, pytest.param((), marks=pytest.mark.slow)])
def test_published_weights_are_packed_shard_by_shard_and_left_in_their_folder(text_file, published, tmp_path, layout):
    file = tmp_path / "run.yaml"
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hf": str(published), "seq": 32, "base_dtype": "nf4"},
        "data": {"source": "text", "path": str(text_file), "eval_tokens": 0},
        "train": {"steps": 2, "batch": 16},
    }
    file.write_text(json.dumps(sections))
    train(load(file, [LORA, "optimizer.lr=0.03", *(layout or ("mesh={data: 1}",))]))
    saved = find_checkpoint(tmp_path / "run")[0]
    assert saved.manifest.base is not None and all("lora_" in entry.path for entry in saved.manifest.arrays if "params/" in entry.path)
    loaded, plain = jgt.load(tmp_path / "run"), jgt.load(f"hf:{published}")
    params, numbers = flat(loaded.params), flat(plain.params)
    packed = {path for path, x in params.items() if x.dtype == np.uint8}
    assert len(packed) == 7
    for path in packed:
        np.testing.assert_array_equal(params[path], np.asarray(Packing("nf4").pack(numbers[path])), err_msg=path)
    export([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"])
    tokens = np.arange(16)[None]
    np.testing.assert_allclose(jgt.load(f"hf:{tmp_path / 'merged'}").logits(tokens), loaded.logits(tokens), atol=1e-4)


def test_what_cannot_be_packed_is_refused(tiny, tiny_file):
    with pytest.raises(InputError, match=r"model\.base_dtype: nf4 packs the matrices of a model that lora: adapts\. Add that section"):
        tiny("model.base_dtype=nf4", "optimizer.train=[layers/attn/**]")
    with pytest.raises(
        InputError, match=r"^command line: .*int8 packs frozen matrices whose last dim is a multiple of 64, and there are none"
    ):
        prepared(tiny_file, LORA, "model.embed=48", "model.heads=4", "model.ffn=96", "model.base_dtype=int8")
