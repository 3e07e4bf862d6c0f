"""The layouts that a search may try: all of them use all devices and the whole batch, and what the user has set stays."""

import math
import random

import pytest

from jgt.document import InputError
from jgt.rules import load_rules, make_rules
from train.config import load
from train.plan.search.layout import Roles
from train.plan.search.plans import RunFile
from train.plan.search.space import OpenLayout, candidates

MODEL = "model={kind: llama, layers: 4, embed: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 256, seq: 32}"


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {batch: 32, remat: auto}\n")
    return str(path)


def opened(run_file, *overrides, free=()):
    return OpenLayout.read(RunFile(config=run_file, overrides=(MODEL, *overrides)), free)


def space(run_file, *overrides, devices=16):
    return candidates(opened(run_file, *overrides), devices)


def test_every_layout_uses_all_devices_and_the_whole_batch(run_file):
    found = space(run_file)
    assert len(found) > 500
    assert len(set(found)) == len(found)
    for one in found:
        assert math.prod(dict(one.mesh).values()) == 16
        assert one.rows_at_once * one.parts == 32
        assert (one.stages is not None) == (one.size(["stage"]) > 1)


def test_long_rows_may_be_shared(run_file):
    def shared(seq, devices=8):
        found = candidates(opened(run_file, f"model.seq={seq}", "train.batch=1"), devices)
        return {one.size(["seq"]) for one in found if one.rules == "jgt:context" and one.size(["seq"]) > 1}

    assert shared(32_768) == {2, 4, 8}
    # Each of twice as many parts has equally many tokens.
    assert shared(32_768 + 4) == {2}
    assert not shared(8_192)


def test_the_trainer_takes_the_layouts(run_file):
    for one in random.Random(0).sample(space(run_file), 25):
        run = load(run_file, [MODEL, "devices.virtual_cpu=16", *one.overrides])
        assert run.mesh == dict(one.mesh)
        assert run.config.train.accumulate == one.accumulate
        assert (run.pipeline is None) == (one.stages is None)


@pytest.mark.parametrize(
    ("override", "holds"),
    [
        ("mesh={tensor: 4, data: -1}", lambda c: c.size(["tensor"]) == 4),
        ("mesh={tensor: 4, fsdp: 4}", lambda c: c.size(["tensor"]) == c.size(["fsdp"]) == 4 and c.size(dict(c.mesh)) == 16),
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
    found = candidates(opened(str(path), "mesh.tensor=1", free=["mesh", "rules"]), 16)
    assert {one.size(["tensor"]) for one in found} == {1}
    assert len({one.size(["fsdp"]) for one in found}) > 3


def test_rules_of_ones_own_say_which_axes_there_are(run_file, tmp_path):
    (tmp_path / "own.yaml").write_text("axes: {batch: [data]}\ninputs: {'batch/*': [batch, null]}\nparams: {'**': [model, ...]}\n")
    found = space(run_file, "rules=own.yaml", "mesh=null")
    assert {tuple(dict(one.mesh)) for one in found} == {("data", "model")}
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


def test_a_layout_is_there_once_whatever_the_file_of_its_rules(run_file):
    found = [one.text for one in space(run_file) if one.accumulate == one.rows == 1 or one.stages is not None]
    # With tensor 1 and data 1 the rules of fsdp_tensor are those of fsdp, and without stages those of a pipeline are others'.
    assert "fsdp: fsdp 16, rows 1 x 2, remat block" in [one.text for one in space(run_file)]
    assert not [text for text in found if text.startswith(("fsdp_tensor: fsdp 16,", "hybrid: fsdp", "hybrid: replica 16,"))]
    assert not [text for text in found if text.startswith("pipeline") and "stage" not in text]


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("fsdp", Roles(batch=("fsdp",), weights=("fsdp",))),
        ("replicated", Roles(batch=("data",))),
        ("hybrid", Roles(batch=("replica", "fsdp"), weights=("fsdp",))),
        ("zero1", Roles(batch=("data",), state=("data",))),
        ("fsdp_tensor", Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor=("tensor",))),
        ("fsdp_sequence", Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor=("tensor",), sequence=True)),
        ("overlap", Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor=("tensor",), sequence=True, overlap=True)),
        ("pipeline", Roles(batch=("data", "fsdp"), weights=("fsdp",), tensor=("tensor",), others=("stage",))),
        ("experts", Roles(batch=("data", "fsdp", "expert"), weights=("fsdp",), experts=("expert",))),
    ],
)
def test_roles_follow_from_specs(name, roles):
    assert Roles.of(load_rules(f"jgt:{name}"), "stage") == roles


def test_an_axis_that_splits_only_activations_has_no_other_role():
    rules = make_rules({"inputs": {"batch/*": ["rows", "context"]}, "params": {"**": ["model", ...]}, "default": "replicate"})
    assert Roles.of(rules, "stage") == Roles(batch=("rows",), tensor=("model",), others=("context",))


def test_the_axis_of_a_pipeline_may_have_another_name(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "axes: {batch: [dp]}\ninputs: {'batch/*': [batch, null]}\nparams: {'**/embedding': [pp, null]}\ndefault: replicate\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text("train: {batch: 32}\nrules: own.yaml\npipeline: {signal: layers, axis: pp, microbatches: 4}\n")
    found = candidates(opened(str(path), free=["pipeline"]), 4)
    assert {one.stages.axis for one in found if one.stages} == {"pp"}
    assert all((one.stages is not None) == (one.size(["pp"]) > 1) for one in found)
