"""The bytes that a plan reports as sent, compared with counts by hand and with an independent count of a whole training step.

Rings over n devices: a device sends (n-1)/n of the whole array for all-gather, reduce-scatter and all-to-all, twice that for all-reduce,
and its own array for collective-permute.
"""

import math
import re
from collections import Counter

import jax
import pytest
from counted import BATCH, EMBED, FFN, GOLDENS, MESHES, OUT, PROGRAMS, ROUNDS
from plugin import needs_plugin

import jgt
from jgt.planner.compiled import compile_function
from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.collectives import collectives
from jgt.planner.hlo.text import Module
from jgt.planner.plan import read_plan
from train.config import load
from train.setup import prepare

F32 = 4
DATA, TENSOR, EIGHT = 2, 4, 8

MLP = [
    # The sums of columns [batch/data, out] and, backward, [batch/data, embed].
    ("all-reduce", "f32", 2 * (TENSOR - 1) * (BATCH // DATA * OUT * F32) // TENSOR, 1, ("tensor",), "mlp", "forward"),
    ("all-reduce", "f32", 2 * (TENSOR - 1) * (BATCH // DATA * EMBED * F32) // TENSOR, 1, ("tensor",), "mlp", "backward"),
    # The gradients of the parts of up [embed, ffn/tensor] and down [ffn/tensor, out].
    ("all-reduce", "f32", 2 * (DATA - 1) * (EMBED * FFN // TENSOR * F32) // DATA, 1, ("data",), "mlp", "backward"),
    ("all-reduce", "f32", 2 * (DATA - 1) * (FFN // TENSOR * OUT * F32) // DATA, 1, ("data",), "mlp", "backward"),
    # The loss.
    ("all-reduce", "f32", 2 * (DATA - 1) * F32 // DATA, 1, ("data",), "mlp", "forward"),
]
FSDP = [
    ("all-gather", "f32", (EIGHT - 1) * (EMBED * FFN * F32) // EIGHT, 1, ("fsdp",), "linear", "forward"),
    ("all-reduce", "f32", 2 * (EIGHT - 1) * F32 // EIGHT, 1, ("fsdp",), "linear", "forward"),
]
SCATTERED = ("reduce-scatter", "f32", (EIGHT - 1) * (EMBED * FFN * F32) // EIGHT, 1, ("fsdp",), "linear", "backward")
REDUCED = ("all-reduce", "f32", 2 * (EIGHT - 1) * (EMBED * FFN * F32) // EIGHT, 1, ("fsdp",), "linear", "backward")
RING = [("collective-permute", "f32", BATCH // 2 * (EMBED // 4) * F32, ROUNDS, ("stage",), "ring", "forward")]
EXCHANGE = [("all-to-all", "f32", (EIGHT - 1) * (2 * BATCH // EIGHT * BATCH * F32) // EIGHT, 1, ("expert",), "dispatch", "forward")]

# XLA for CPU does not form reduce-scatter.
ON_CPU = {"mlp": MLP, "fsdp": [*FSDP, REDUCED], "ring": RING, "exchange": EXCHANGE}
ON_GPU = {**ON_CPU, "fsdp": [*FSDP, SCATTERED]}


def rows(found):
    return sorted((c.kind, c.dtype, c.bytes, c.count, c.axes, c.signal, c.phase) for c in found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_counted_by_hand_on_cpu(name):
    fn, args = PROGRAMS[name](jax.devices())
    assert rows(jgt.plan(fn, *args).collectives) == sorted(ON_CPU[name])


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.h100.*.txt")), ids=lambda path: path.stem)
def test_counted_by_hand_on_gpu(path):
    name = path.name.partition(".")[0]
    assert rows(collectives(Module.parse(path.read_text()), MESHES[name], EIGHT)) == sorted(ON_GPU[name])


# -- a training step, counted again --------------------------------------------------------------------------------

_ONE = re.compile(r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_RING = {"all-gather": lambda n: (n - 1) / n, "all-reduce": lambda n: 2 * (n - 1) / n, "reduce-scatter": lambda n: n - 1}
_WIDTH = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}


def sent(text):
    """kind → bytes that a device sends, from the sizes of results. Asynchronous collectives list their operands before the results."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{\n((?: .*\n)*)\}", text, re.MULTILINE))
    total = Counter()
    for name, lines in blocks.items():
        for line in lines.splitlines():
            if found := _ONE.search(line):
                shapes, kind, start = found.groups()
                arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
                results = arrays[len(arrays) // 2 :] if start and (kind != "all-reduce" or shapes.startswith("((")) else arrays
                size = sum(_WIDTH[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in results)
                total[kind] += runs(blocks, name) * size * _RING.get(kind, lambda _: 1)(group_size(line))
    return total


def runs(blocks, name):
    """How often a computation runs: once for each line that names it; the body of a loop, once per iteration.

    A branch is one of a pipeline of two stages: one iteration of its loop has no microbatch that enters or leaves the first stage.
    """
    if outer := [
        outer
        for outer, block in blocks.items()
        if re.search(rf"(branch_computations=.*|(true|false)_computation=)%{re.escape(name)}[,}}]", block)
    ]:
        return runs(blocks, *outer) - 1
    lines = [
        (outer, line)
        for outer, block in blocks.items()
        for line in block.splitlines()
        if re.search(rf"=%{re.escape(name)}\b(?![\w.-])", line)
    ]
    trips = [re.search(r'"known_trip_count":\{"n":"(\d+)"', line) for _, line in lines]
    return sum(int(trip[1] if trip else 1) * runs(blocks, outer) for (outer, _), trip in zip(lines, trips, strict=True)) if lines else 1


def group_size(line):
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line):
        sizes = dict(part.split("=") for part in found[1].split(","))
        return math.prod(int(sizes[axis]) for axis in found[2].split(","))
    assert "source_target_pairs" in line, line
    return 1


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ("quickstart", None),
        pytest.param("llama-8b", "h100:1x8", marks=[needs_plugin, pytest.mark.slow]),
        *(pytest.param(config, "h100:1x8", marks=[needs_plugin, pytest.mark.slow]) for config in ("quickstart", "pipeline")),
        *(pytest.param(config, None, marks=pytest.mark.slow) for config in ("pipeline", "llama-8b")),
    ],
)
def test_a_training_step_counted_again(root, config, target):
    where = None if target is None else Target.parse(target)
    setup = prepare(load(root / f"configs/{config}.yaml"), devices=None if where is None else devices_of(where))
    compiled = compile_function(setup.train_step(), setup.step_shapes, where)
    total = sent(compiled.text)
    assert len(total) > 1
    found = read_plan(compiled).collectives
    assert sum(c.total_bytes for c in found) == sum(total.values())
    assert {kind: sum(c.total_bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}} == total
    assert max(c.count for c in found if c.signal.startswith("layers/")) >= setup.run.config.model.layers, "a loop over layers counts"
