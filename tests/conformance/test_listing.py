"""The listings of drawn programs: at most fifteen lines that compute in a fresh process what the judge has compared."""

import ast
import random
import subprocess
import sys
from collections import Counter

import pytest
from drawn import drawn

from jgt.conformance.grammar import draw_chain
from jgt.conformance.judge import shaped
from jgt.conformance.layouts import lay_out
from jgt.conformance.listing import is_wrong, listing

SPECS = {"x0": (("a",), ("b",)), "v0": ((), ("a", "b"))}


def printed(text):
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
def test_a_planted_fault_is_printed_by_a_fresh_process(gradient, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    program = drawn("x0 + jnp.roll(x0, 1, 0) * k0.sum()", indices={"k0": ((3,), 8)}, specs=SPECS, mesh=(2, 2), gradient=gradient)
    text = listing(program, 0)
    right = printed(text)
    assert "value v0: 0 of 64 numbers are wrong" in right and not is_wrong(right)
    assert ("gradient x0: 0 of 64" in right) == gradient
    wrong = text.replace("lax.with_sharding_constraint(x, ", "lax.with_sharding_constraint(x + 1, ")
    assert wrong != text and is_wrong(printed(wrong))


def test_every_listing_is_python_of_at_most_fifteen_lines():
    lengths = []
    for seed in range(25):
        rng = random.Random(seed)
        program = draw_chain(rng, Counter(), shaped, lambda program: False)
        for draw in range(3):
            text = listing(lay_out(rng, program, (2, 2, 2)), draw)
            ast.parse(text)
            assert text.count("\n") <= 15, text
            lengths.append(len(program.steps))
    assert len(set(lengths)) > 3


def test_a_fault_of_one_device_has_no_mesh():
    text = listing(drawn("x0 * 2", specs=SPECS, mesh=(2, 2)), 1, one_device=True)
    assert "Mesh(" not in text and "device_count=1" in text and text.count("\n") <= 15
