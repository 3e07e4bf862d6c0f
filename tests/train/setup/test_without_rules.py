"""A run without rules: data-parallel over all devices, or refused where its mesh needs rules."""

import jax
import pytest

from jgt.__main__ import main as jgt_command
from jgt.document import InputError
from train.config import load
from train.run.train import train
from train.setup import prepare


def losses(rows):
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        ("null", "Mesh: data 8 = 8 x cpu (no rules: data-parallel, data splits the batch)"),
        ("{replica: 2, fsdp: 4}", "Mesh: replica 2 x fsdp 4 = 8 x cpu (no rules: data-parallel, replica x fsdp splits the batch)"),
    ],
    ids=["no mesh", "replica and fsdp"],
)
def test_all_devices_share_the_batch_and_the_losses_are_those_of_one(tiny, tmp_path, read_rows, capsys, mesh, line):
    train(tiny("train.steps=3"))
    assert "(no rules: the model runs unsharded on one device)" in capsys.readouterr().out
    other = tmp_path / "other"
    train(tiny("train.steps=3", f"mesh={mesh}", f"run.dir={other}"))
    assert line in capsys.readouterr().out
    assert losses(read_rows(other / "metrics.jsonl")) == pytest.approx(losses(read_rows(tmp_path / "run" / "metrics.jsonl")), rel=1e-5)


def test_each_device_has_its_rows_and_the_whole_model(tiny):
    setup = prepare(tiny("mesh=null"))
    assert setup.batch_shardings["inputs"].shard_shape((16, 32)) == (2, 32)
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(setup.shardings.params))


def test_an_axis_that_needs_rules_is_refused(tiny_file):
    with pytest.raises(InputError) as caught:
        load(tiny_file, ["mesh={data: 2, tensor: 4}", "rules=null"])
    (problem,) = caught.value.problems
    assert (
        "mesh: without rules a run is data-parallel, and does not use the axis tensor. Add rules, for example rules: jgt:fsdp_tensor"
        in problem
    )
    # An axis of one device uses nothing.
    assert load(tiny_file, ["mesh={data: 8, tensor: 1}"]).mesh == {"data": 8, "tensor": 1}


def test_a_batch_that_does_not_divide_says_what_would(tiny):
    with pytest.raises(InputError) as caught:
        prepare(tiny("mesh=null", "train.batch=12"))
    assert "train.batch: no rules, so data-parallel: inputs: " in caught.value.problems[0]
    assert "data=8 does not divide. A size of 8 or 16 would fit" in caught.value.problems[0]


def test_a_check_without_a_mesh_is_of_one_device(tiny_file, capsys):
    assert jgt_command(["check", "--config", str(tiny_file), "mesh=null"]) == 0
    assert jgt_command(["check", "--config", str(tiny_file), "mesh=null", "--devices", "8"]) == 0
    assert "data 8" in capsys.readouterr().out
