"""The types and bytes in which activations, weights and gradients travel under the shipped rules, in steps compiled for described GPUs."""

import itertools
from collections import Counter
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


# -- weights and gradients -------------------------------------------------------------------------------------------

LAYERS, EMBED, FFN, VOCAB = 2, 64, 128, 512
MATRICES, TABLES, NORMS = LAYERS * (4 * EMBED * EMBED + 3 * EMBED * FFN), 2 * VOCAB * EMBED, (2 * LAYERS + 1) * EMBED
"""Elements."""
MESHES = {
    "replicated": {"data": 8},
    "zero1": {"data": 8},
    "fsdp": {"fsdp": 8},
    "hybrid": {"replica": 2, "fsdp": 4},
    "tensor": {"data": 4, "tensor": 2},
    "sequence": {"data": 4, "tensor": 2},
    "fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipeline": {"data": 2, "fsdp": 2, "stage": 2, "tensor": 1},
}
SIZE = {"f32": 4, "bf16": 2}


def formula(rules, gradients):
    """The bytes that a device sends of weights and gradients, by kind and type of collective.

    A gather or a scatter over n devices is (n - 1) / n of the whole array, a sum is twice that.
    """
    sizes = {axis: MESHES[rules].get(axis, 1) for axis in ("data", "replica", "fsdp", "stage", "tensor")}
    copies, shards, inside = sizes["data"] * sizes["replica"], sizes["fsdp"], sizes["tensor"] * sizes["stage"]
    mine = (MATRICES + TABLES) / inside
    sent = Counter()
    # Matrices are gathered forward and backward, in a pipeline once; each table is read once.
    reads = 1 if rules == "pipeline" else 2
    sent["all-gather", "bf16"] = (reads * MATRICES + TABLES) / inside * 2 * (shards - 1) / shards
    scattered = copies if rules == "zero1" else shards
    sent["reduce-scatter", gradients] = mine * SIZE[gradients] * (scattered - 1) / scattered
    summed = 1 if rules == "zero1" else copies
    if rules == "fsdp_tensor":
        # Known and wasteful: XLA adds up tables over both axes, and each device then takes its part.
        tables = TABLES / inside
        sent["reduce-scatter", gradients] -= tables * SIZE[gradients] * (scattered - 1) / scattered
        sent["all-reduce", gradients] = tables * SIZE[gradients] * 2 * (copies * shards - 1) / (copies * shards)
        mine -= tables
    sent["all-reduce", gradients] += mine * SIZE[gradients] / shards * 2 * (summed - 1) / summed
    # With a split sequence, devices of the axis tensor have parts of the sums as well. Stages have the norms of their layers.
    devices = copies * shards * (sizes["tensor"] if rules == "sequence" else 1)
    norms = LAYERS / sizes["stage"] * 2 * EMBED + EMBED if rules == "pipeline" else NORMS
    kind, times = ("reduce-scatter", 1) if rules == "zero1" else ("all-reduce", 2)
    sent[kind, "f32"] += norms * 4 * times * (devices - 1) / devices
    return {kind: pytest.approx(size, rel=0.01) for kind, size in sent.items() if size}


def is_of_weights(collective):
    """Not of new parameters, tokens, single numbers or activations."""
    if collective.signal == "optimizer" or collective.dtype not in SIZE or collective.bytes <= 64:
        return False
    return collective.kind != "collective-permute" and {"data", "replica", "fsdp"} & set(collective.axes)


@needs_plugin
@pytest.mark.parametrize(
    ("rules", "gradients"),
    [
        pytest.param(rules, gradients, marks=() if (rules, gradients) in (("fsdp", None), ("pipeline", "bf16")) else pytest.mark.slow)
        for rules in MESHES
        for gradients in (None, "f32", "bf16")
    ],
)
def test_bytes_over_data_and_fsdp_are_those_of_the_formula(rules, gradients):
    mesh = ", ".join(f"{axis}: {size}" for axis, size in MESHES[rules].items())
    pipeline = ("pipeline={signal: layers, microbatches: 2}",) if rules == "pipeline" else ()
    found = Counter()
    for c in planned(rules, f"{{{mesh}}}", f"optimizer.gradients={gradients or 'null'}", *pipeline).collectives:
        if is_of_weights(c):
            found[c.kind, c.dtype] += c.total_bytes
    assert dict(found) == formula(rules, gradients or ("f32" if rules == "pipeline" else "bf16"))


# -- activations -----------------------------------------------------------------------------------------------------


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


RUN = [("overlap", "llama", "none"), ("fsdp_sequence", "llama", "block")]
"""Those that are not slow."""
PIPELINED = "pipeline={signal: layers, schedule: 1f1b, microbatches: 4}"
SEQUENCE = {
    "sequence": ("{data: 2, tensor: 4}",),
    "fsdp_sequence": ("{data: 1, fsdp: 2, tensor: 4}",),
    "overlap": ("{data: 1, fsdp: 2, tensor: 4}",),
    "pipeline_sequence": ("{data: 2, fsdp: 1, stage: 2, tensor: 2}", PIPELINED),
}


@needs_plugin
@pytest.mark.parametrize(
    ("rules", "kind", "remat"),
    [
        pytest.param(rules, kind, remat, marks=() if (rules, kind, remat) in RUN else pytest.mark.slow)
        for rules, kind, remat in itertools.product(SEQUENCE, ("llama", "gpt"), ("none", "matmuls", "block"))
    ],
)
def test_a_split_sequence_sends_what_the_formulas_say(rules, kind, remat):
    plan = planned(rules, *SEQUENCE[rules], f"model.kind={kind}", f"train.remat={remat}")
    found, said = Counter(), Counter()
    for collective in plan.collectives:
        if collective.axes == ("tensor",) and collective.signal.startswith("layers/"):
            found[collective.signal] += collective.bytes * collective.count
    for row in plan.expected:
        if row.axes == ("tensor",) and row.signal.startswith("layers/"):
            said[row.signal] += row.bytes
    # Gradients of norms and biases have no formula.
    assert found == {signal: pytest.approx(number, rel=0.02) for signal, number in said.items()}
    # Activations travel in the type of matmuls.
    assert not [c for c in plan.collectives if "tensor" in c.axes and c.dtype == "f32" and c.kind == "all-gather" and c.bytes > 16 * 1024]
    assert not [f for f in plan.findings if f.signal.startswith(("layers", "head"))]


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
