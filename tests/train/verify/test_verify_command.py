"""`jgt verify`: every layout that ships changes no number, and a wrong one ends with exit code 1 and says where."""

import json

import jax.numpy as jnp
import pytest

from jgt.document import InputError
from jgt.program import constraints
from jgt.program.tracing import tensor_name
from train.config import load
from train.run.__main__ import check
from train.run.__main__ import verify as main
from train.verify.compare import compare_layouts, is_verified
from train.verify.small import small_mesh, small_run

RULES = {
    "replicated": "{data: 8}",
    "zero1": "{data: 8}",
    "fsdp": "{data: 2, fsdp: 4}",
    "hybrid": "{replica: 2, fsdp: 4}",
    "tensor": "{data: 4, tensor: 2}",
    "sequence": "{data: 2, tensor: 4}",
    "fsdp_tensor": "{data: 2, fsdp: 2, tensor: 2}",
    "fsdp_sequence": "{data: 2, fsdp: 2, tensor: 2}",
    "overlap": "{data: 2, fsdp: 2, tensor: 2}",
    "pipeline": "{data: 2, fsdp: 1, stage: 2, tensor: 2}",
    "context": "{data: 1, fsdp: 2, seq: 2, tensor: 2}",
    "pipeline_sequence": "{data: 1, fsdp: 2, stage: 2, tensor: 2}",
}
STAGES = "pipeline={signal: layers, schedule: 1f1b, microbatches: 4}"


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """What is verified here is not known elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def verified(name, *overrides):
    run = load(name, overrides)
    return compare_layouts(small_run(run, 8, overrides), run)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("rules", RULES)
def test_rules_that_ship_change_no_number(rules, kind):
    stages = [STAGES] if rules.startswith("pipeline") else []
    found = verified("jgt:quickstart", f"rules=jgt:{rules}", f"mesh={RULES[rules]}", f"model.kind={kind}", *stages)
    assert found.is_right, str(found)
    assert not found.avoided


LATENT = ["model.latent={rank: 20, query_rank: 24, rope_dim: 4, value_dim: 12}", "model.kv_heads=null", "model.head_dim=12"]


@pytest.mark.parametrize(
    "overrides", [[], ["optimizer.name=muon"], ["train.remat=block"], ["train.accumulate=2"], ["data.documents=mask"], LATENT]
)
def test_runs_with_other_options_change_no_number(overrides):
    assert verified("jgt:quickstart", *overrides).is_right


@pytest.mark.parametrize("name", ["moe", "mixtral-8x7b", "deepseek-v3", "llama-70b", "two-pods", "pipeline"])
def test_run_files_that_ship_change_no_number(name):
    found = verified(f"jgt:{name}")
    assert found.is_right, str(found)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb", "zb_interleaved", "zigzag"])
def test_schedules_change_no_number(schedule):
    virtual = ", virtual: 2" if "interleaved" in schedule else ""
    stages = f"pipeline={{signal: layers, schedule: {schedule}, microbatches: 4{virtual}}}"
    assert verified("jgt:quickstart", "rules=jgt:pipeline", f"mesh={RULES['pipeline']}", stages).is_right


def test_the_command_says_what_it_compared(capsys):
    assert main(["jgt:quickstart"]) == 0
    printed = capsys.readouterr().out
    assert "Compared on data=2 x fsdp=2 x tensor=2 with one device" in printed
    assert "The layout changes no number: 50 arrays" in printed
    assert main(["jgt:quickstart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["num_compared"] == 50


def test_a_wrong_layout_ends_with_1_and_the_place(capsys, monkeypatch):
    right = constraints.constraint_equations

    def wrong(var, ahead, behind, like):

        if like is None or tensor_name(like) != "hidden":
            return right(var, ahead, behind, like)
        return constraints.traced_equations(lambda x: jnp.roll(x, 1, axis=-1), var, like)

    monkeypatch.setattr("jgt.sharding.rewrite.constraint_equations", wrong)
    assert main(["jgt:quickstart"]) == 1
    printed = capsys.readouterr().out
    assert "The layout changes the numbers" in printed
    assert "The first difference: the value of output of signal layers/mlp" in printed
    assert "fsdp_tensor.yaml:" in printed


def test_bad_input_ends_with_2(capsys):
    assert main(["jgt:quickstart", "mesh={data: 2, fsdp: 2, tensor: 2, more: 2}", "devices.virtual_cpu=16"]) == 2
    assert "data, fsdp, tensor, more split something, which takes 16 devices. Use --devices 16" in capsys.readouterr().err
    assert main(["jgt:quickstart", "model.layer=2"]) == 2
    assert "Did you mean 'layers'?" in capsys.readouterr().err


def test_check_recommends_it_until_a_layout_was_compared(tmp_path, capsys):
    rules = tmp_path / "mine.yaml"
    rules.write_text(
        "signals: {layers/mlp: {params: {'*_proj/kernel': [null, tensor], 'down/kernel': [tensor, null]}}}\ndefault: replicate\n"
    )
    run = ["jgt:quickstart", f"rules={rules}"]
    hint = "jgt verify FILE"
    assert check(run) == 0
    assert hint in " ".join(capsys.readouterr().out.split())
    assert main(run) == 0
    assert check(run) == 0
    assert hint not in " ".join(capsys.readouterr().out.split()).rpartition("Compared on")[2]
    assert is_verified(load(run[0], run[1:]))
    assert not is_verified(load(run[0], [*run[1:], "mesh={tensor: 2, data: 4, fsdp: 1}"]))
    assert is_verified(load("jgt:quickstart", ["rules=jgt:fsdp"]))


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ({"data": 4, "fsdp": 2, "stage": 8, "tensor": 8}, 16, {"data": 2, "fsdp": 2, "stage": 2, "tensor": 2}),
        ({"data": 1, "fsdp": 32, "tensor": 8}, 8, {"data": 1, "fsdp": 4, "tensor": 2}),
        ({"fsdp": -1}, 8, {"fsdp": 4}),
        ({"data": 2, "tensor": 2}, 8, {"data": 2, "tensor": 2}),
    ],
)
def test_meshes_shrink_to_axes_of_two_and_four(sizes, devices, expected):
    assert small_mesh(sizes, devices, "run.yaml:1") == expected


def test_a_mesh_of_too_many_axes_says_how_many_devices_it_takes():
    with pytest.raises(InputError, match="a, b, c, d split something, which takes 16 devices"):
        small_mesh(dict.fromkeys("abcd", 2), 8, "run.yaml:1")
