"""What a plan says that `sync:` sends, by formula, is what the compiled step sends."""

import json
import re
from pathlib import Path

import pytest
from plugin import needs_plugin

import jgt
from train.config import load
from train.plan.__main__ import main as plan
from train.setup import prepare

RULES = Path(__file__).parents[3] / "configs" / "rules"
EXPERTS = (f"rules={RULES / 'experts.yaml'}", "mesh={data: 2, fsdp: 1, expert: 4}", "model.experts={count: 4, choose: 2, ffn: 32}")
PLAIN = (f"rules={RULES / 'hybrid.yaml'}", "mesh={replica: 2, fsdp: 4}")


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(f"extends: {RULES / 'pipeline.yaml'}\naxes: {{batch: [replica, data, fsdp]}}\n")
    mesh = "mesh={replica: 2, data: 1, fsdp: 2, stage: 2, tensor: 1}"
    return f"rules={path}", mesh, "pipeline={signal: layers, schedule: interleaved, microbatches: 2}", "model.layers=4"


@pytest.mark.parametrize("wire", ["f32", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", ["", pytest.param(", late: 1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_pipeline", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_formula_of_gradients_is_what_is_sent(tiny_file, pipelined, wire, more, has_pipeline):
    # Large enough for blocks, and for the few numbers of losses and norms not to count.
    size = ("model.embed=64", "model.ffn=192", "model.seq=16")
    layout = pipelined if has_pipeline else PLAIN
    setup = prepare(load(tiny_file, [*size, *layout, f"sync={{axis: replica, wire: {wire}{more}}}"]))
    plan = jgt.plan(setup.train_step(), *setup.step_shapes)
    formula = sum(row.bytes for row in plan.expected if "replica" in row.axes)
    assert formula
    assert sum(c.total_bytes for c in plan.collectives if "replica" in c.axes) == pytest.approx(formula, rel=0.01)
    assert not [finding for finding in plan.findings if "replica" in str(finding)]


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "every", "told"),
    [
        ((*PLAIN,), [1] * 6 + [10, 50, 500] * 3, ""),
        ((*EXPERTS,), [10, 50, 500] * 3, "Not compared: .*the model keeps more than parameters"),
    ],
)
def test_policies_are_compared_as_far_as_the_model_allows_them(tiny_file, capsys, more, every, told):
    axis = "replica" if more == PLAIN else "data"
    command = ["--config", str(tiny_file), "--target", "h100:2x4", "--sync", "--json", *more, f"sync={{axis: {axis}, every: 10}}"]
    assert plan(command) == 0
    found = capsys.readouterr()
    rows = json.loads(found.out)
    assert sorted(row["every"] for row in rows) == sorted(every)
    assert re.search(told, found.err)
    # More steps between exchanges send less, and so do fewer bits.
    f32 = [row["bytes_a_step"] for row in rows if row["wire"] == "f32" and row["every"] > 1]
    assert f32 == sorted(f32, reverse=True)
    assert all(row["ms_a_step"] > 0 for row in rows)
