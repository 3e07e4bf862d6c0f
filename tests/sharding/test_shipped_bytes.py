"""The types and bytes in which activations, weights and gradients travel under the shipped rules, in steps compiled for described GPUs."""

import itertools
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from plugin import needs_plugin

from jgt.planner.hardware.target import Target
from train.config import load
from train.plan.make import make_plan

ROOT = Path(__file__).parent.parent.parent
SMALL = ("model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128", "model.seq=128", "model.vocab=512")
# The formulas describe the program of XLA's partitioner. Afterwards, pipelined all-gathers repeat a part of the recompute.
PARTITIONED = "xla.preset=none"


@cache
def planned(rules, mesh, *overrides):
    """The plan of a small bf16 model on 8 GPUs."""
    options = (f"rules=rules/{rules}.yaml", f"mesh={mesh}", "model.dtype=bf16", "train.batch=16", "model.attention=xla")
    return make_plan(load(ROOT / "configs/quickstart.yaml", [*SMALL, *options, *overrides]), Target.parse("h100:1x8"))


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
    "fsdp_sequence": {"data": 2, "fsdp": 2, "tensor": 2},
    "overlap": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipeline": {"data": 2, "fsdp": 2, "stage": 2, "tensor": 1},
    "pipeline_sequence": {"data": 1, "fsdp": 2, "stage": 2, "tensor": 2},
}
SIZE = {"f32": 4, "bf16": 2}


def formula(rules, dtype, gradients):
    """The bytes that a device sends of weights and gradients, by kind and type of collective.

    A gather or a scatter over n devices is (n - 1) / n of the whole array, a sum is twice that.
    """
    sizes = {axis: MESHES[rules].get(axis, 1) for axis in ("data", "replica", "fsdp", "stage", "tensor")}
    copies, shards, inside = sizes["data"] * sizes["replica"], sizes["fsdp"], sizes["tensor"] * sizes["stage"]
    # With a split sequence, devices of the axis tensor have parts of the sums as well; stages add these up first. Stages have the norms of
    # their layers.
    devices = copies * shards * (sizes["tensor"] if rules in ("sequence", "fsdp_sequence", "overlap") else 1)
    norms = LAYERS / sizes["stage"] * 2 * EMBED + EMBED if sizes["stage"] > 1 else NORMS
    mine = (MATRICES + TABLES) / inside
    sent = Counter()
    if rules == "zero1":
        sent["all-gather", dtype] = (mine + norms) * SIZE[dtype] * (copies - 1) / copies
        sent["reduce-scatter", gradients] += mine * SIZE[gradients] * (copies - 1) / copies
        sent["reduce-scatter", "f32"] += norms * 4 * (copies - 1) / copies
    else:
        # Matrices are gathered forward and backward, in a pipeline once; each table is read once.
        reads = 1 if sizes["stage"] > 1 else 2
        sent["all-gather", dtype] = (reads * MATRICES + TABLES) / inside * SIZE[dtype] * (shards - 1) / shards
        sent["reduce-scatter", gradients] = mine * SIZE[gradients] * (shards - 1) / shards
        sent["all-reduce", gradients] += mine * SIZE[gradients] / shards * 2 * (copies - 1) / copies
        sent["all-reduce", "f32"] += norms * 4 * 2 * (devices - 1) / devices
    return {kind: pytest.approx(size, rel=0.01) for kind, size in sent.items() if size}


def is_of_weights(collective):
    """Not of new parameters, tokens, single numbers or activations."""
    if collective.signal == "optimizer" or collective.dtype not in SIZE or collective.bytes <= 64:
        return False
    return collective.kind != "collective-permute" and {"data", "replica", "fsdp"} & set(collective.axes)


# The sums of loss chunks cross devices in another place of the program.
QUICK = ("fsdp_sequence", "bf16", None, 4)
CASES = [
    *[(rules, "bf16", gradients, 1) for rules in MESHES for gradients in (None, "f32", "bf16")],
    *[(rules, "f32", None, 1) for rules in ("zero1", "fsdp", "fsdp_tensor")],
    *[("fsdp", "bf16", gradients, 4) for gradients in ("f32", "bf16")],
    *[("fsdp_tensor", "bf16", gradients, 4) for gradients in (None, "f32")],
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


def collectives_of(rules, dtype, gradients, chunks):
    """Those of a case."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in MESHES[rules].items())
    pipeline = ("pipeline={signal: layers, microbatches: 2}",) if "stage" in MESHES[rules] else ()
    options = (f"model.dtype={dtype}", f"optimizer.gradients={gradients or 'null'}", f"train.loss_chunks={chunks}", *pipeline, PARTITIONED)
    return planned(rules, f"{{{mesh}}}", *options).collectives


@needs_plugin
@pytest.mark.parametrize(("rules", "dtype", "gradients", "chunks"), [QUICK, *SLOW])
def test_bytes_over_data_and_fsdp_are_those_of_the_formula(rules, dtype, gradients, chunks):
    found = Counter()
    for c in collectives_of(rules, dtype, gradients, chunks):
        if is_of_weights(c):
            found[c.kind, c.dtype] += c.total_bytes
    assert dict(found) == formula(rules, dtype, gradients or ("f32" if "stage" in MESHES[rules] else dtype))


@needs_plugin
@pytest.mark.parametrize("rules", ["fsdp_tensor", *(pytest.param(rules, marks=pytest.mark.slow) for rules in ("fsdp_sequence", "overlap"))])
def test_the_gradient_of_the_embedding_is_never_summed_whole(rules):
    plan = planned(rules, "{data: 1, fsdp: 2, tensor: 4}", "model.vocab=4096", "train.batch=256", PARTITIONED)
    shard = 4096 * EMBED // 4 * SIZE["bf16"] // 2
    sent = [(c.kind, c.axes, c.total_bytes) for c in plan.collectives if c.signal == "embed" and "fsdp" in c.axes]
    assert sorted(sent) == [("all-gather", ("fsdp",), shard), ("reduce-scatter", ("fsdp",), shard)]


# -- activations -----------------------------------------------------------------------------------------------------


def activations_of(collectives):
    """How activations of the layers travel: kinds and types. The gradients of norms and biases are smaller."""
    found = [c for c in collectives if "tensor" in c.axes and c.signal.startswith("layers/") and c.bytes > 16 * 1024]
    return {(c.kind, c.dtype) for c in found}


@needs_plugin
@pytest.mark.slow
def test_what_is_split_along_the_sequence_is_gathered_in_the_type_of_matmuls():
    # The same plan as above.
    assert activations_of(collectives_of(*QUICK)) == {("all-gather", "bf16"), ("reduce-scatter", "bf16")}


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("remat", ["none", "block", "matmuls"])
def test_so_it_is_for_other_models_and_with_recompute(kind, remat):
    found = planned("sequence", "{data: 2, tensor: 4}", f"model.kind={kind}", f"train.remat={remat}").collectives
    assert activations_of(found) == {("all-gather", "bf16"), ("reduce-scatter", "bf16")}


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
    plan = planned(rules, *SEQUENCE[rules], f"model.kind={kind}", f"train.remat={remat}", PARTITIONED)
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
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt"])
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


FP8, PARTS = "model.fp8=true", "train.accumulate=2"
EXPLAINED = {
    "hybrid, parts": ("hybrid", "{replica: 2, fsdp: 4}", PARTS),
    "fsdp, eight bits": ("fsdp", "{fsdp: 8}", FP8, "train.remat=block"),
    "sequence, eight bits": ("sequence", *SEQUENCE["sequence"], FP8),
    "pipeline, eight bits": ("pipeline", "{data: 1, fsdp: 4, stage: 2, tensor: 1}", FP8, PIPELINED),
    "experts, parts": ("experts", "{data: 1, fsdp: 1, expert: 8}", "model.experts={count: 8, choose: 2, ffn: 64}", PARTS),
    "zero1, eight bits, parts": ("zero1", "{data: 8}", FP8, PARTS),
    "hybrid, eight bits": ("hybrid", "{replica: 2, fsdp: 4}", FP8, "train.remat=matmuls"),
    "tensor, eight bits": ("tensor", "{data: 2, tensor: 4}", FP8),
    "fsdp_tensor, eight bits": ("fsdp_tensor", "{data: 1, fsdp: 4, tensor: 2}", FP8, "train.remat=block"),
    "fsdp_sequence, eight bits": ("fsdp_sequence", "{data: 1, fsdp: 4, tensor: 2}", FP8, "train.remat=block"),
    "pipeline_sequence, eight bits": ("pipeline_sequence", *SEQUENCE["pipeline_sequence"], FP8, "pipeline.remat=layer"),
    "sync in int8": ("hybrid", "{replica: 2, fsdp: 4}", "sync={axis: replica, wire: int8}"),
    "late sync": ("hybrid", "{replica: 2, fsdp: 4}", "sync={axis: replica, late: 1}"),
}
"""Rules, mesh and overrides. The first case always runs."""


@needs_plugin
@pytest.mark.parametrize("case", [*list(EXPLAINED)[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in list(EXPLAINED)[1:])])
def test_layers_send_what_the_formulas_say(case):
    plan = planned(*EXPLAINED[case])
    found, said = Counter(), Counter()
    for row in plan.collectives:
        found[row.signal] += row.total_bytes
    for row in plan.expected:
        said[row.signal] += row.bytes
    for signal in ("layers/attn", "layers/mlp", "layers/moe", "head"):
        # Between blocks eight bits are gathered, where the formula has the bytes of the sum. Beside experts only the head's sums move.
        least = 0.0 if (case, signal) == ("experts, parts", "head") else 0.85
        assert least * said[signal] <= found[signal] <= 1.1 * said[signal], signal
    assert not [f for f in plan.findings if f.kind == "unexplained" and f.signal.startswith(("layers", "head"))]
