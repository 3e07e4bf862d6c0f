"""Signals and phases, read from the names that JAX and XLA give to instructions."""

import pytest

from jgt.planner.hlo.origin import Origin, operand_names, origin_of, phase_of

NAMES = {
    "jit(step)/sig.mlp/dot_general": ("mlp", "forward"),
    "jit(step)/sig.layers/while/body/closed_call/sig.attn/dot_general": ("layers/attn", "forward"),
    "jit(step)/sig.layers/sig.attn/sig.scores-2.b/exp": ("layers/attn/scores-2.b", "forward"),
    "jit(step)/jvp(sig.mlp)/dot_general": ("mlp", "forward"),
    "jit(step)/jvp(sig.layers)/while/body/sig.mlp/dot_general": ("layers/mlp", "forward"),
    "jit(step)/transpose(jvp(sig.mlp))/dot_general": ("mlp", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.mlp/transpose": ("layers/mlp", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/checkpoint/rematted_computation/sig.mlp/tanh": ("layers/mlp", "recompute"),
    # JAX lists the scopes around a recomputed region twice.
    "jit(step)/while/body/transpose(jvp())/sig.mlp/jvp()/sig.mlp/rematted_computation/mul": ("mlp", "recompute"),
    "jit(step)/transpose(jvp(sig.layers))/sig.mlp/jvp(sig.layers)/sig.mlp/mul": ("layers/mlp", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/jvp(sig.layers)/rematted_computation/sig.mlp/mul": ("layers/mlp", "recompute"),
    "jit(step)/transpose(jvp(sig.layers))/rematted_computation/checkpoint/eval_jaxpr/jvp(jvp(sig.layers))/sig.mlp/mul": (
        "layers/mlp",
        "recompute",
    ),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.mlp/transpose(jvp(sig.mlp))/dot_general": ("layers/mlp", "backward"),
    "jit(step)/transpose(jvp(sig.a))/sig.b/sig.c/transpose(jvp(jvp(sig.a)))/sig.b/sig.c/sig.d/mul": ("a/b/c/d", "backward"),
    "jit(step)/jvp(sig.layers)/sig.a/jvp(sig.a)/mul": ("layers/a/a", "forward"),
    "jit(step)/transpose(jvp(sig.layers))/sig.layers/mul": ("layers/layers", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.a/sig.b/sig.a/sig.b/checkpoint/mul": ("layers/a/b", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.a/sig.a/checkpoint/rematted_computation/mul": ("layers/a", "recompute"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.a/sig.a/add_any": ("layers/a", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.a/sig.a/mul": ("layers/a/a", "backward"),
    "sig.mlp": ("mlp", "forward"),
    # XLA merged instructions: the first name counts.
    "jit(step)/transpose(jvp(sig.a))/mul;jit(step)/jvp(sig.b)/add": ("a", "backward"),
    "jit(step)/mul;jit(step)/sig.b/add": None,
    # Combined operands: only an origin that all of them share counts.
    "jit(step)/(jvp(sig.a)/dot_general:jvp(sig.a)/reduce_sum)": ("a", "forward"),
    "jit(step)/sig.layers/(sig.a/dot_general:sig.a/reduce_sum)": ("layers/a", "forward"),
    "(jit(step)/sig.a/mul:jit(step)/sig.a/add)": ("a", "forward"),
    "jit(step)/(jvp(sig.a)/mul:jvp(sig.b)/mul)": None,
    "jit(step)/(jvp(sig.a)/mul:transpose(jvp(sig.a))/mul)": None,
    "jit(step)/(sig.a/mul:add)": None,
    # A pipeline's own work, and the phases that it marks.
    "jit(step)/jgt.pipeline/while/body/ppermute": ("pipeline", "forward"),
    "jit(step)/jgt.pipeline/while/body/jgt.backward/ppermute": ("pipeline", "backward"),
    "jit(step)/jgt.pipeline/while/body/sig.layers/sig.mlp/dot_general": ("layers/mlp", "forward"),
    "jit(step)/jgt.pipeline/while/body/jgt.backward/sig.layers/transpose(jvp(sig.mlp))/dot_general": ("layers/mlp", "backward"),
    "jit(step)/jgt.pipeline/while/body/jgt.backward/jgt.recompute/sig.mlp/dot_general": ("mlp", "recompute"),
    # No signals.
    "": None,
    "jit(step)/dot_general": None,
    "jit(step)/transpose(jvp())/dot_general": None,
    "jit(step)/nosig.mlp/dot_general": None,
    "arrays[0]": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_origins(name):
    expected = NAMES[name]
    assert origin_of(name) == (expected and Origin(signal=expected[0], phase=expected[1]))


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("jit(step)/add", "forward"),
        ("jit(step)/transpose(jvp())/add", "backward"),
        ("jit(step)/checkpoint/rematted_computation/add", "recompute"),
        # The primitive `transpose` is not differentiation.
        ("jit(step)/transpose", "forward"),
        ("", "forward"),
    ],
)
def test_phases_of_names_without_signals(name, phase):
    assert phase_of(name) == phase


def test_each_operand_of_a_combined_collective_has_its_own_name():
    name = "jit(step)/(jvp(sig.a)/reduce_sum:transpose(jvp(sig.b))/dot_general:sig.c/(x:y))"
    parts = ["jit(step)/jvp(sig.a)/reduce_sum", "jit(step)/transpose(jvp(sig.b))/dot_general", "jit(step)/sig.c/(x:y)"]
    assert operand_names(name, 3) == parts


@pytest.mark.parametrize("name", ["jit(step)/sig.a/add", "jit(step)/(sig.a/add:sig.b/add)", "jit(step)/transpose(jvp(sig.a))", ""])
def test_a_name_with_another_number_of_parts_counts_for_every_operand(name):
    assert operand_names(name, 3) == [name] * 3
