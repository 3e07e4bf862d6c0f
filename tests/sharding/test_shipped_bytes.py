"""The types in which activations and weights travel under the shipped rules, in steps compiled for described GPUs."""

from pathlib import Path

import pytest
from plugin import needs_plugin

from jgt.planner.chip import parse_target
from train.config import load
from train.plan.make import make_plan

ROOT = Path(__file__).parent.parent.parent
SMALL = ("model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128", "model.seq=128", "model.vocab=512")


def planned(rules, mesh, *overrides):
    """The plan of a small bf16 model on 8 GPUs."""
    options = (f"rules=rules/{rules}.yaml", f"mesh={mesh}", "model.dtype=bf16", "train.batch=16", "model.attention=xla")
    return make_plan(load(ROOT / "configs/quickstart.yaml", [*SMALL, *options, *overrides]), parse_target("h100:1x8"), None)


@needs_plugin
@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        ("gpt", "none"),
        ("llama", "block"),
        pytest.param("gpt", "block", marks=pytest.mark.slow),
        pytest.param("llama", "none", marks=pytest.mark.slow),
        pytest.param("llama", "matmuls", marks=pytest.mark.slow),
    ],
)
def test_what_is_split_along_the_sequence_is_gathered_in_the_type_of_matmuls(kind, remat):
    found = planned("sequence", "{data: 2, tensor: 4}", f"model.kind={kind}", f"train.remat={remat}").collectives
    # The gradients of norms and biases are smaller.
    activations = [c for c in found if "tensor" in c.axes and c.signal.startswith("layers/") and c.bytes > 16 * 1024]
    kinds = {(c.kind, c.dtype) for c in activations}
    assert kinds == {("all-gather", "bf16"), ("reduce-scatter", "bf16")}


@needs_plugin
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_eight_bits_are_gathered_in_eight_bits_and_reduced_as_often_as_sixteen(kind):
    def sent(fp8):
        options = ("train.remat=block", f"model.kind={kind}", f"model.fp8={fp8}")
        found = planned("sequence", "{data: 2, tensor: 4}", *options).collectives
        large = [c for c in found if "tensor" in c.axes and c.signal.startswith("layers/") and c.bytes > 4096]
        gathers, scatters = ([c for c in large if c.kind == one] for one in ("all-gather", "reduce-scatter"))
        assert len(gathers) + len(scatters) == len(large)
        return gathers, {c.dtype for c in gathers}, {(c.signal, c.phase, c.dtype, c.count, c.bytes) for c in scatters}

    (eight, types, sums), (sixteen, _, sums_in_sixteen) = sent("true"), sent("false")
    assert types == {"f8e4m3fn", "f8e5m2"}
    # XLA computes the results of recomputed row-parallel matmuls in bf16, though nothing reads them.
    assert sums <= sums_in_sixteen and {s[1] for s in sums_in_sixteen - sums} <= {"recompute"}
    assert sum(c.total_bytes for c in eight) < 0.8 * sum(c.total_bytes for c in sixteen)
