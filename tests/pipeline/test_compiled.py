"""The compiled program does not unroll, its memory does not grow with microbatches, and no device takes a branch alone."""

import itertools
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from hlo import axes_of, collectives, conditionals, reached, sizes_of, sources
from models import RULES, decoder_loss, mesh_of, pipeline_of

import jgt
from jgt.planner.hlo.instruction import COLLECTIVES
from jgt.planner.hlo.text import Module
from jgt.schedule.schedules import SCHEDULES

# Activations are so large that tables of indices and the tokens hardly count. A dim of the vocabulary is known by its factor 101.
SEQ, EMBED, FFN, PRIME, LAYERS = 64, 128, 256, 101, 8
VOCAB = 4 * PRIME
STAGES = {"data": 2, "stage": 4}
SHARDED = {"data": 2, "fsdp": 2, "stage": 2}
KINDS_OF = {"1f1b": "FB", "zb": "FBW"}
"""The slots of a table."""
FLAT = ("1f1b", "interleaved", "zigzag", "zb")


@cache
def lowered(schedule, microbatches, num_layers=LAYERS, *, sizes=(), gather="step", idle="compute"):
    """Loss and gradients of the decoder, with one row per microbatch and data shard. sizes: (axis, size) of a mesh; default: STAGES.

    Stages without an item compute, as on a GPU.
    """
    sizes = dict(sizes or STAGES)
    rows = microbatches * sizes["data"] * sizes.get("fsdp", 1)
    weights = {"up": (num_layers, EMBED, FFN), "down": (num_layers, FFN, EMBED)}
    params = {"embed": (VOCAB, EMBED), "layers": weights, "unembed": (VOCAB, EMBED)}
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), params, is_leaf=lambda x: isinstance(x, tuple))
    batch = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, SEQ), dtype) for name, dtype in batch.items()}
    pipeline = pipeline_of(schedule=schedule, microbatches=microbatches, gather=gather, idle=idle)
    loss = jgt.shard(decoder_loss, jgt.make_rules(RULES), mesh_of(**sizes), pipeline=pipeline)
    return jax.jit(jax.value_and_grad(loss)).lower(shapes, batch)


@cache
def compiled(*args, **kwargs):
    """Compiled without LLVM's optimisations, because the tests only look at XLA's."""
    return lowered(*args, **kwargs).compile(compiler_options={"xla_backend_optimization_level": 0})


@cache
def module(*args, **kwargs):
    """The compiled program, parsed."""
    return Module.parse(compiled(*args, **kwargs).as_text())


def sharded(gather):
    """1f1b over a mesh with an fsdp axis."""
    return module("1f1b", 8, sizes=tuple(SHARDED.items()), gather=gather)


# -- nothing unrolls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_program_is_as_long_for_more_microbatches_and_for_more_layers(schedule):
    # With one layer in a chunk there is a barrier more: two stages have more than one of 8 layers.
    sizes = (("data", 2), ("stage", 2))
    lines = [len(lowered(schedule, *numbers, sizes=sizes).as_text().splitlines()) for numbers in ((8, 8), (64, 8), (8, 32))]
    assert lines[0] == lines[1] == lines[2]


# -- memory ------------------------------------------------------------------------------------------------------


def temporary(schedule, microbatches):
    return compiled(schedule, microbatches).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("schedule", FLAT)
def test_memory_is_the_same_for_more_microbatches_of_the_same_size(schedule):
    assert temporary(schedule, 64) <= 1.02 * temporary(schedule, 8)


def test_gpipe_saves_every_microbatch():
    hidden = LAYERS // STAGES["stage"] * SEQ * FFN * 4
    assert temporary("gpipe", 64) > 64 * hidden
    assert temporary("gpipe", 64) > 2 * temporary("1f1b", 64)


@pytest.mark.parametrize("schedule", FLAT)
def test_nothing_is_as_large_as_the_logits_of_a_batch(schedule):
    """The limit is the logits of one data shard; the whole batch has twice as many rows."""
    logits = 64 * SEQ * VOCAB // STAGES["stage"]
    largest = max(itertools.chain.from_iterable(sizes_of(i) for i in module(schedule, 64).instructions()))
    assert LAYERS // STAGES["stage"] * EMBED * FFN <= largest < logits


@pytest.mark.parametrize("schedule", FLAT)
def test_a_stage_has_its_part_of_the_vocabulary_and_one_microbatch_of_logits(schedule):
    sizes = {a.size for i in module(schedule, 64).instructions() for a in i.arrays if any(dim % PRIME == 0 for dim in a.dims)}
    assert SEQ * PRIME in sizes
    assert max(sizes) == EMBED * PRIME


# -- traffic -----------------------------------------------------------------------------------------------------


def talk(module, sizes, *, in_loops):
    """(kind, axes, elements of each array) of every collective."""
    return [(i.kind, axes_of(i, sizes), sizes_of(i)) for i in collectives(module, in_loops=in_loops)]


def axes_in_loops(module, sizes):
    return frozenset().union(*(axes for _, axes, _ in talk(module, sizes, in_loops=True)))


@pytest.mark.parametrize("schedule", FLAT)
def test_loops_talk_between_stages_only(schedule):
    assert axes_in_loops(module(schedule, 8), STAGES) == {"stage"}


def test_loops_talk_between_stages_only_where_weights_are_gathered_once_a_step():
    assert axes_in_loops(sharded("step"), SHARDED) == {"stage"}


def test_loops_gather_layers_one_by_one_where_they_are_told_to():
    found = [(kind, sizes) for kind, axes, sizes in talk(sharded("layer"), SHARDED, in_loops=True) if axes == {"fsdp"}]
    assert {kind for kind, _ in found} == {"all-gather", "reduce-scatter"}
    for kind, sizes in found:
        assert sizes == [EMBED * FFN // (1 if kind == "all-gather" else SHARDED["fsdp"])]
    assert axes_in_loops(sharded("layer"), SHARDED) == {"stage", "fsdp"}


TABLE, STACK = VOCAB // SHARDED["stage"] * EMBED, LAYERS // SHARDED["stage"] * EMBED * FFN
"""The elements of the table, and of the stacked weights, on one stage. Their gradients have as many."""


def reductions(gather, kind, axis):
    """The number of gradients that are reduced over an axis outside of loops, whole or scattered, without scalars."""
    names = {size // part: name for name, size in (("table", TABLE), ("stack", STACK)) for part in (1, SHARDED["fsdp"])}
    found = talk(sharded(gather), SHARDED, in_loops=False)
    return Counter(names[size] for k, axes, sizes in found if k == kind and axis in axes for size in sizes if size > 1)


def test_gradients_are_reduced_once_after_the_loops():
    assert reductions("step", "all-reduce", "data") == {"table": 2, "stack": 2}
    assert reductions("step", "reduce-scatter", "fsdp") == {"table": 2, "stack": 2}
    assert reductions("step", "all-reduce", "fsdp") == {}


def test_gradients_that_are_scattered_layer_by_layer_are_reduced_over_the_other_axis_once():
    assert reductions("layer", "all-reduce", "data") == {"table": 2, "stack": 2}
    assert reductions("layer", "reduce-scatter", "fsdp") == {"table": 2}
    assert reductions("layer", "all-reduce", "fsdp") == {}


def gathered(gather):
    """The sizes of the arrays that are gathered outside of loops."""
    return {size for kind, _, sizes in talk(sharded(gather), SHARDED, in_loops=False) if kind == "all-gather" for size in sizes}


def test_a_device_never_holds_weights_or_gradients_of_another_stage():
    assert gathered("step") == {TABLE, STACK}
    assert gathered("layer") == {TABLE}


# -- branches ----------------------------------------------------------------------------------------------------

ALONE = {"partition-id", "replica-id", "argument", "custom-call", "infeed", "recv", *COLLECTIVES}
"""Ops whose results may differ between devices."""


# With one chunk a stage, only the first ticks of the backward pass have no cotangent of the embedding.
@pytest.mark.parametrize(("schedule", "branches"), [("1f1b", 1), ("interleaved", 3), ("zigzag", 3)])
def test_all_devices_take_a_branch_together(schedule, branches):
    program = module(schedule, 8)
    predicates = [sources(program, program.operands(conditional)[0]) for conditional in conditionals(program)]
    assert len(predicates) >= branches
    for found in predicates:
        assert not found & ALONE
        assert {"constant", "dynamic-slice"} <= found


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb", marks=pytest.mark.slow)])
def test_a_branch_that_a_stage_takes_alone_talks_to_nobody(schedule):
    program = module(schedule, 8, idle="skip")
    alone = [c for c in conditionals(program) if sources(program, program.operands(c)[0]) & ALONE]
    assert len(alone) >= len(KINDS_OF[schedule])
    called = reached(program, [name for conditional in alone for name in conditional.called])
    assert any(i.op == "dot" for i in program.instructions(within=called))
    assert not [i for i in program.instructions(within=called) if i.kind in COLLECTIVES]
