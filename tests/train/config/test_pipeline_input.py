"""Wrong pipelines: exit code 2 from both commands, every problem at once, each with its file, line and key. Also the shipped config."""

import json
from pathlib import Path

import pytest

from jgt.__main__ import main as jgt_main
from jgt.schedule.schedules import SCHEDULES
from train.__main__ import main
from train.config import load

CONFIGS = Path(__file__).parents[3] / "configs"
MESH = "{data: 2, fsdp: 1, stage: 2, tensor: 2}"
GOOD = {"signal": "layers", "axis": "stage", "schedule": "1f1b", "microbatches": "4"}
NAMES = ", ".join(SCHEDULES)


@pytest.fixture
def write(tmp_path, text_file):
    """Writes a config with each key of its pipeline on its own line. A key with the value None is left out."""

    def _write(pipeline=None, *, mesh=MESH, rules=CONFIGS / "rules" / "pipeline.yaml", layers=4, train="{batch: 16}"):
        lines = [
            f"run: {{dir: {tmp_path}/run}}",
            f"model: {{layers: {layers}, embed: 32, heads: 4, kv_heads: 4, ffn: 64, vocab: 256, seq: 32}}",
            f"data: {{source: text, path: {text_file}, eval_tokens: 0}}",
            f"train: {train}",
            *(f"{key}: {value}" for key, value in (("mesh", mesh), ("rules", rules)) if value is not None),
            "pipeline:",
            *(f"  {key}: {value}" for key, value in {**GOOD, **(pipeline or {})}.items() if value is not None),
        ]
        path = tmp_path / "run.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    return _write


@pytest.fixture
def refused(capsys):
    """The problems that both commands report for a file; they must be the same."""

    def _refused(path):
        assert main(["--config", str(path)]) == 2
        assert not (path.parent / "run").exists()
        shown = capsys.readouterr()
        assert shown.out == ""
        assert jgt_main(["check", "--config", str(path)]) == 2
        assert capsys.readouterr() == shown
        return shown.err.splitlines()

    return _refused


def at(path, key, message):
    """A message about a key of the pipeline, at its line."""
    start = "pipeline:" if key is None else f"  {key}:"
    line = 1 + next(i for i, text in enumerate(path.read_text().splitlines()) if text.startswith(start))
    return f"{path}:{line}: pipeline{'' if key is None else f'.{key}'}: {message}"


@pytest.mark.parametrize(
    ("pipeline", "key", "message"),
    [
        (
            {"schedule": "1f2b"},
            "schedule",
            "there is no schedule '1f2b'. Did you mean '1f1b'? A table of your own is a path that ends with .csv",
        ),
        ({"axis": "stgae"}, "axis", "the mesh has no axis 'stgae'. Did you mean 'stage'?"),
        ({"microbatches": "0"}, "microbatches", "0 is too small; it must be at least 1"),
        ({"microbatches": "many"}, "microbatches", "must be a whole number, not the text 'many'"),
        ({"virtual": "0"}, "virtual", "0 is too small; it must be at least 1"),
        ({"schedul": "zb"}, "schedul", "unknown key. Did you mean 'schedule'?"),
        ({"remat": "stages"}, "remat", "'stages' is not one of none, layer, stage. Did you mean 'stage'?"),
        ({"gather": "steps"}, "gather", "'steps' is not one of step, layer. Did you mean 'step'?"),
        (
            {"signal": None},
            None,
            "the key 'signal' is missing: the signal whose layer scan is pipelined: `jax.lax.scan`, `nnx.scan` or `nn.scan` directly "
            "under it",
        ),
        (
            {"microbatches": None},
            None,
            "the key 'microbatches' is missing: the number of parts of the batch that go through the stages one after another",
        ),
        ({"signal": "layer"}, "signal", "no signal of the program is 'layer'. Layer scans are under: 'layers'"),
    ],
    ids=str,
)
def test_one_key(write, refused, pipeline, key, message):
    path = write(pipeline)
    assert refused(path) == [at(path, key, message)]


def test_microbatches_divide_the_rows_of_a_data_shard(write, refused):
    (problem,) = refused(path := write({"microbatches": "3"}))
    assert problem.startswith(at(path, "microbatches", "3 microbatches do not divide the batch of 16"))
    assert problem.endswith("These divide it: 1, 2, 4, 8")


def test_microbatches_divide_a_part_of_the_batch(write, refused):
    (problem,) = refused(path := write({"microbatches": "8"}, train="{batch: 16, accumulate: 2}"))
    assert problem.startswith(at(path, "microbatches", "8 microbatches do not divide the batch of 8"))
    assert problem.endswith("These divide it: 1, 2, 4")


def test_a_number_of_chunks_where_the_schedule_has_its_own(write, refused):
    message = "virtual is 2, but 1f1b always has 1 chunk a stage. Leave virtual out, or take interleaved or zb_interleaved"
    assert refused(path := write({"virtual": "2"})) == [at(path, "schedule", message)]


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({}, "'layers' has 3 layers, too few for 4 stages. Make stage or virtual smaller"),
        ({"schedule": "zigzag"}, "'layers' has 3 layers, too few for 4 stages with 2 chunks each. Make stage or virtual smaller"),
    ],
    ids=str,
)
def test_more_stages_than_layers(write, refused, pipeline, message):
    path = write(pipeline, mesh="{data: 2, fsdp: 1, stage: 4, tensor: 1}", layers=3)
    assert refused(path) == [at(path, "signal", message)]


# -- rules and mesh ----------------------------------------------------------------------------------------------


def test_a_pipeline_needs_rules(write, refused):
    path = write(rules=None)
    assert refused(path) == [at(path, None, "a pipeline needs rules: and a mesh: section with its axis")]


def test_a_pipeline_needs_a_mesh(write, refused):
    path = write(mesh=None)
    (problem,) = refused(path)
    assert problem.startswith(f"{path}:5: rules: rules need a mesh: section")


def test_the_stage_axis_belongs_to_the_pipeline_inside_the_layers(write, refused, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"extends: {CONFIGS}/rules/pipeline.yaml\nsignals:\n  layers/mlp:\n    params: {{down/kernel: [stage, null]}}\n"
        "    tensors: {hidden: [batch, null, [stage, tensor]]}\n    out: [batch, stage, null]\n"
    )
    alone = (
        "lies in the pipeline of 'layers', which has the axis stage for itself. "
        "Take stage out of this spec; the pipeline splits the layers over it"
    )
    assert refused(write(rules="rules.yaml")) == [
        f"{rules}:4: down/kernel: the parameter layers/mlp/down/kernel {alone}",
        f"{rules}:5: hidden: the tensor hidden at layers/mlp {alone}",
        f"{rules}:6: layers/mlp: the value that leaves layers/mlp {alone}",
    ]


def test_the_stages_do_not_split_the_batch(write, refused, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text('axes: {batch: [data, stage]}\ninputs: {"**": [batch, ...]}\nparams: {}\ndefault: replicate\n')
    path = write(rules="rules.yaml")
    assert refused(path) == [at(path, "axis", "the inputs are sharded over stage. Take it out of inputs: and batch")]


# -- tables of one's own -----------------------------------------------------------------------------------------


def table(text, tmp_path):
    (tmp_path / "own.csv").write_text(text)
    return {"schedule": "own.csv", "microbatches": "2"}


GOOD_TABLE = "F0,-\nF1,F0\n-,B0 F1\nB0,B1\nB1,-\n"


def test_a_table_stands_beside_the_file(write, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir("/")
    assert jgt_main(["check", "--config", str(write(table(GOOD_TABLE, tmp_path)))]) == 0
    assert "Everything fits" in capsys.readouterr().out


def test_a_table_that_is_not_there(write, refused, tmp_path):
    path = write({"schedule": "own.csv"})
    assert refused(path) == [at(path, "schedule", f"there is no file '{tmp_path}/own.csv'. Name a .csv file or one of {NAMES}")]


def test_a_table_that_deadlocks(write, refused, tmp_path):
    path = write(table("F0,F0\nF1,-\n-,B0 F1\nB0,B1\nB1,-\n", tmp_path))
    assert refused(path) == [
        f"{tmp_path}/own.csv:1: tick 0, stage 1: F of microbatch 0, chunk 1 waits for F of chunk 0, "
        f"which runs in the same tick and arrives in the next: "
        "a deadlock. Move it to tick 1 or later"
    ]


def test_a_table_of_other_numbers(write, refused, tmp_path):
    path = write(table(GOOD_TABLE, tmp_path) | {"microbatches": "4", "virtual": "2"}, mesh="{data: 1, fsdp: 1, stage: 4, tensor: 2}")
    assert refused(path) == [
        at(path, "schedule", f"{key} is {number}, but the table own.csv has {own}. Change one of them")
        for key, number, own in (("stages", 4, 2), ("microbatches", 4, 2), ("virtual", 2, 1))
    ]


# -- all at once -------------------------------------------------------------------------------------------------


def test_the_problems_of_a_pipeline_come_with_the_others(write, refused):
    path = write({"axis": "stag", "schedule": "zbb"}, train="{batch: 16, steps: 0}", mesh="{data: 2, fsdp: 1, stage: 2}")
    problems = refused(path)
    assert f"{path}:4: train.steps: 0 is too small; it must be at least 1" in problems
    assert at(path, "axis", "the mesh has no axis 'stag'. Did you mean 'stage'?") in problems
    assert (
        at(path, "schedule", "there is no schedule 'zbb'. Did you mean 'zb'? A table of your own is a path that ends with .csv") in problems
    )
    # An axis of shipped rules that the mesh lacks has size 1.
    assert not any("the mesh has no axis 'tensor'" in problem for problem in problems)


def test_misfits_of_rules_come_with_those_of_the_pipeline(write, refused, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"extends: {CONFIGS}/rules/pipeline.yaml\nsignals:\n  layers/mlpp: {{out: [batch, null, null]}}\n"
        f"  layers: {{out: [batch, stage, null]}}\n"
    )
    unmatched, reserved, microbatches = sorted(
        refused(path := write({"microbatches": "5"}, rules="rules.yaml")), key=lambda p: "pipeline" in p
    )
    assert unmatched.startswith(f"{rules}:3: layers/mlpp: no signal of the program matches")
    assert reserved.startswith(f"{rules}:4: layers: the value that leaves layers lies in the pipeline")
    assert microbatches.startswith(at(path, "microbatches", "5 microbatches do not divide the batch of 16"))


# -- the config that ships ---------------------------------------------------------------------------------------


def test_the_config_that_ships_is_good(capsys):
    assert jgt_main(["check", "--config", str(CONFIGS / "pipeline.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"data": 2, "fsdp": 1, "stage": 2, "tensor": 2}
    specs = {p["name"]: p["spec"] for p in found["parameters"]}
    layers = {name: spec for name, spec in specs.items() if name.startswith("layers/")}
    assert len(layers) == 9
    assert all(spec.startswith("[stage, ") for spec in layers.values())
    assert {spec for name, spec in specs.items() if name not in layers} == {"[[stage, tensor, fsdp], null]", "[null]"}


def test_the_config_that_ships_has_the_model_of_the_quickstart():
    pipeline, quickstart = (load(CONFIGS / name).config for name in ("pipeline.yaml", "quickstart.yaml"))
    assert pipeline.pipeline is not None
    for section in ("model", "devices", "data", "optimizer", "train", "sample"):
        assert getattr(pipeline, section) == getattr(quickstart, section)
