"""What a plan says that `sync:` sends, by formula, is what the compiled step sends."""

from pathlib import Path

import pytest

import jgt
from train.config import load
from train.setup import prepare

RULES = Path(__file__).parents[2] / "configs" / "rules"
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
