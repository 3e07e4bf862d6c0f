"""Signals and phases from the names that JAX and XLA give to instructions."""

import pytest

from jgt.plan.origin import Origin, combined, origin_of, phase_of

NAMES = {
    "jit(step)/sig.mlp/dot_general": ("mlp", "forward"),
    "jit(step)/sig.layers/while/body/closed_call/sig.attn/dot_general": ("layers/attn", "forward"),
    "jit(step)/sig.layers/sig.attn/sig.scores-2.b/exp": ("layers/attn/scores-2.b", "forward"),
    "jit(step)/jvp(sig.mlp)/dot_general": ("mlp", "forward"),
    "jit(step)/jvp(sig.layers)/while/body/sig.mlp/dot_general": ("layers/mlp", "forward"),
    "jit(step)/transpose(jvp(sig.mlp))/dot_general": ("mlp", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/sig.mlp/transpose": ("layers/mlp", "backward"),
    "jit(step)/transpose(jvp(sig.layers))/while/body/checkpoint/rematted_computation/sig.mlp/tanh": ("layers/mlp", "recompute"),
    "sig.mlp": ("mlp", "forward"),
    # Of instructions made into one, the first.
    "jit(step)/transpose(jvp(sig.a))/mul;jit(step)/jvp(sig.b)/add": ("a", "backward"),
    "jit(step)/mul;jit(step)/sig.b/add": None,
    # Of several operands, what all of them share.
    "jit(step)/(jvp(sig.a)/dot_general:jvp(sig.a)/reduce_sum)": ("a", "forward"),
    "jit(step)/sig.layers/(sig.a/dot_general:sig.a/reduce_sum)": ("layers/a", "forward"),
    "(jit(step)/sig.a/mul:jit(step)/sig.a/add)": ("a", "forward"),
    "jit(step)/(jvp(sig.a)/mul:jvp(sig.b)/mul)": None,
    "jit(step)/(jvp(sig.a)/mul:transpose(jvp(sig.a))/mul)": None,
    "jit(step)/(sig.a/mul:add)": None,
    # What a pipeline does itself, and the phases that it writes out.
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
        # The name of the primitive alone transposes nothing.
        ("jit(step)/transpose", "forward"),
        ("", "forward"),
    ],
)
def test_phases_of_names_without_signals(name, phase):
    assert phase_of(name) == phase


def test_operands_of_a_combined_collective_have_names_of_their_own():
    name = "jit(step)/(jvp(sig.a)/reduce_sum:transpose(jvp(sig.b))/dot_general:sig.c/(x:y))"
    parts = ["jit(step)/jvp(sig.a)/reduce_sum", "jit(step)/transpose(jvp(sig.b))/dot_general", "jit(step)/sig.c/(x:y)"]
    assert combined(name, 3) == parts


@pytest.mark.parametrize("name", ["jit(step)/sig.a/add", "jit(step)/(sig.a/add:sig.b/add)", "jit(step)/transpose(jvp(sig.a))", ""])
def test_a_name_that_is_not_of_as_many_operands_stands_for_all(name):
    assert combined(name, 3) == [name] * 3
