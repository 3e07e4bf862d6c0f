"""Drawing: every production is a program that JAX takes, known classes are drawn rarely, and what was not met is preferred."""

import math
import random
from collections import Counter

import jax
import pytest
from drawn import drawn

from jgt.conformance.classes import form_on_axes, is_hidden
from jgt.conformance.grammar import Fields, draw_chain, productions, single_operations
from jgt.conformance.judge import shaped
from jgt.conformance.layouts import MESHES, cells, lay_out, least_met
from jgt.conformance.program import DrawnArgument, DrawnProgram, Step


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


def chain(seed, met=None, hidden=lambda program: False):
    rng = random.Random(seed)
    program = draw_chain(rng, met or Counter(), shaped, hidden)
    return lay_out(rng, program, rng.choice(MESHES))


@pytest.mark.parametrize("kind", sorted(productions()))
def test_every_production_is_a_program(kind):
    for production in productions()[kind]:
        tried = []
        for seed in range(12):
            rng = random.Random(seed)
            rank = rng.choice([rank for rank in production.ranks if rank < 4])
            inputs = tuple(DrawnArgument(name=f"x{n}", shape=(8, 16, 8)[:rank], dtype="float32", seed=n) for n in range(2))
            fields = Fields(rng, {value.name: value for value in inputs}, 2)
            step = Step(name="v0", shape=(), dtype="", kind=kind, code=fields.fill(production.text), operand="x0", dim=fields.dim)
            program = DrawnProgram(
                inputs=(*inputs, *fields.inputs), steps=(step,), outputs=("v0",), gradient=False, salt=0, mesh=(2,), specs={}
            )
            try:
                tried.append(shaped(program).steps[0].dtype)
                break
            except Exception as error:
                tried.append(f"{step.code}: {error}")
        assert tried[-1] in ("float32", "bfloat16", "int32", "bool"), tried


def test_every_single_operation_is_a_program_that_several_axes_split():
    for operation in single_operations():
        program = shaped(operation)
        assert program.steps[0].dtype in ("float32", "int32")
        split = [lay_out(random.Random(seed), program, (2, 2, 2, 2), share=1.0) for seed in range(5)]
        assert any(len({axis for spec in each.specs.values() for axes in spec for axis in axes}) == 4 for each in split)


def test_chains_are_the_same_for_a_seed_and_have_what_a_program_needs():
    programs = [chain(seed) for seed in range(30)]
    assert programs[:5] == [chain(seed) for seed in range(5)]
    assert programs == [DrawnProgram.of_json(program.to_json()) for program in programs]
    assert {program.gradient for program in programs} == {True, False}
    assert {len(program.mesh) for program in programs} >= {1, 2, 3}
    assert {len(program.steps) for program in programs} >= {2, 3, 4}
    for program in programs:
        sizes = dict(zip("abcd", program.mesh, strict=False))
        for name, spec in program.specs.items():
            for size, axes in zip(program.values[name].shape, spec, strict=True):
                assert size % math.prod(sizes[axis] for axis in axes) == 0


def test_a_known_class_is_drawn_rarely():
    muted = {("cumsum",): 1, ("tanh", "sort"): 50}
    assert is_hidden(muted, ["cumsum", "tanh"], 0.6) and not is_hidden(muted, ["cumsum", "tanh"], 0.4)
    assert is_hidden(muted, ["tanh", "sort", "roll"], 0.06) and not is_hidden(muted, ["tanh", "sort"], 0.04)
    assert not is_hidden(muted, ["tanh", "roll"], 1.0) and not is_hidden({}, ["cumsum"], 1.0)
    product = next(operation for operation in single_operations() if operation.steps[0].code == "x0 @ x1")
    assert form_on_axes(product, 3) == "@ on 3 axes" != form_on_axes(product, 4)
    common = Counter(form for seed in range(25) for form in set(chain(seed).forms)).most_common(1)[0][0]
    known = {(common,): 9}
    assert not any(common in chain(seed, hidden=lambda program: is_hidden(known, program.forms, 0.5)).forms for seed in range(25))


def test_what_was_not_met_is_preferred():
    met = Counter(["a", "a", "b"])
    assert least_met(met, ["a", "b", "c"], lambda name: (name,)) == "c" and least_met(met, ["a", "b"], lambda name: (name,)) == "b"
    steered, alone = Counter(), Counter()
    for seed in range(40):
        steered.update(cells(chain(seed, steered)))
        alone.update(cells(chain(seed)))
    assert len(steered) > len(alone)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (None, "free"),
        (((), ()), "whole"),
        ((("a",), ()), "other dim"),
        (((), ("a", "b")), "dim, several axes"),
        ((("a",), ("b",)), "several dims"),
    ],
)
def test_kinds_of_layouts(spec, kind):
    program = drawn("jnp.cumsum(x0, 1)", specs={} if spec is None else {"x0": spec}, mesh=(2, 2))
    step = program.steps[0]
    program = DrawnProgram.of_json(program.to_json() | {"steps": [vars(step) | {"dim": 1}]})
    assert list(cells(program)) == ["input > test", f"input > test > {kind}"]
