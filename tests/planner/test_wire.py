"""What parameters and gradients of the layers send over the axes of the batch, in bytes of the type that the model reads them in."""

import math
from pathlib import Path

import pytest
from plugin import needs_plugin

from jgt.planner.chip import parse_target
from train.config import load
from train.plan.make import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = "{kind: llama, layers: 2, embed: 512, heads: 8, kv_heads: 8, ffn: 2048, vocab: 1024, seq: 128, dtype: %s}"
# Attention has 4 matrices, an MLP 3.
ELEMENTS = 2 * (4 * 512 * 512 + 3 * 512 * 2048)
CASES = {
    # Over how many devices of the axis, how often all is gathered, and by how many other devices a device's part is less.
    "zero1": ("{data: 8}", 8, 1, 1),
    "fsdp": ("{fsdp: 8}", 8, 2, 1),
    "fsdp_tensor": ("{data: 1, fsdp: 4, tensor: 2}", 4, 2, 2),
}


SLOW = [pytest.param(rules, marks=pytest.mark.slow) for rules in ("fsdp", "fsdp_tensor")]


@needs_plugin
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rules", ["zero1", *SLOW])
def test_parameters_and_gradients_travel_in_the_type_that_the_model_reads(rules, dtype):
    mesh, n, gathers, others = CASES[rules]
    layout = (f"mesh={mesh}", f"rules={CONFIGS / 'rules' / rules}.yaml", "devices.virtual_cpu=null")
    overrides = [f"model={SIZES % dtype}", *layout, "train.batch=64"]
    found = make_plan(load(CONFIGS / "quickstart.yaml", overrides), parse_target("h100:1x8"), None)
    whole = ELEMENTS * {"bf16": 2, "f32": 4}[dtype] // others
    batch = {"data", "fsdp"}
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    for one in found.collectives:
        if one.signal.startswith("layers/") and set(one.axes) <= batch:
            sent[one.kind] = sent.get(one.kind, 0) + one.bytes * one.count
    assert sent["all-gather"] == pytest.approx(gathers * whole * (n - 1) / n, rel=0.01)
    assert sent["reduce-scatter"] == pytest.approx(whole * (n - 1) / n, rel=0.01)
    # The gradients of norms.
    assert sent["all-reduce"] < 0.01 * whole
    assert math.isclose(sum(sent.values()), (gathers + 1) * whole * (n - 1) / n, rel_tol=0.01)
