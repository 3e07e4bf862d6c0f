"""The layouts that a search may try: all of them use all devices and the whole batch, and what the user has set stays."""

import math
import random

import pytest

from jgt.document import InputError
from train.code.files import Code
from train.config import load
from train.search.space import Open, candidates

MODEL = "model={kind: llama, layers: 4, embed: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 256, seq: 32}"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {batch: 32, remat: auto}\n")
    return str(path)


def space(run_file, *overrides, devices=16):
    return candidates(Open.read(run_file, [MODEL, *overrides], Code()), devices)


def test_every_layout_uses_all_devices_and_the_whole_batch(run_file):
    found = space(run_file)
    assert len(found) > 500
    assert len(set(found)) == len(found)
    for one in found:
        assert math.prod(one.sizes.values()) == 16
        assert one.rows * one.parts * math.prod(one.sizes[axis] for axis in one.batch_axes) == 32
        assert (one.stages is not None) == (one.sizes.get("stage", 1) > 1)


def test_the_trainer_takes_the_layouts(run_file):
    for one in random.Random(0).sample(space(run_file), 25):
        run = load(run_file, [MODEL, "devices.virtual_cpu=16", *one.overrides])
        assert run.mesh == one.sizes
        assert run.config.train.accumulate == one.accumulate
        assert (run.pipeline is None) == (one.stages is None)


@pytest.mark.parametrize(
    ("override", "holds"),
    [
        ("mesh={tensor: 4, data: -1}", lambda c: c.sizes["tensor"] == 4),
        ("mesh={tensor: 4, fsdp: 4}", lambda c: c.sizes["tensor"] == c.sizes["fsdp"] == 4 and math.prod(c.sizes.values()) == 16),
        ("train.remat=block", lambda c: c.remat is None),
        ("train.accumulate=2", lambda c: c.accumulate == 2),
    ],
)
def test_what_is_set_stays(override, holds, run_file):
    found = space(run_file, override)
    assert found
    assert all(map(holds, found))


def test_an_axis_of_the_command_line_stays_where_the_mesh_is_free(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {batch: 32}\nmesh: {fsdp: 16}\nrules: jgt:fsdp\n")
    found = candidates(Open.read(str(path), [MODEL, "mesh.tensor=1"], Code(), ["mesh", "rules"]), 16)
    assert {one.sizes.get("tensor", 1) for one in found} == {1}
    assert len({one.sizes.get("fsdp", 1) for one in found}) > 3


def test_rules_of_ones_own_say_which_axes_there_are(run_file, tmp_path):
    (tmp_path / "own.yaml").write_text("axes: {batch: [data]}\ninputs: {'batch/*': [batch, null]}\nparams: {'**': [model, ...]}\n")
    found = space(run_file, "rules=own.yaml", "mesh=null")
    assert {tuple(one.sizes) for one in found} == {("data", "model")}
    assert all(one.rules is None and one.stages is None for one in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh={tensor: 3, data: -1}"], "no layout uses 16 devices with tensor=3"),
        (["train.batch=7", "mesh={data: 16}"], "train.batch 7"),
        (["pipeline={signal: layers, microbatches: 4}"], "Free it with pipeline=null"),
        (["train.batchh=7"], "unknown key"),
    ],
)
def test_what_leaves_no_layout_is_refused(overrides, message, run_file):
    with pytest.raises(InputError, match=message):
        space(run_file, *overrides)
