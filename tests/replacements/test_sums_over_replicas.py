"""Sums over replicas by each wire: the bytes that travel, what roundings take away, and the same bits on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import axes_of, collectives
from jax.sharding import NamedSharding, PartitionSpec

import jgt
from jgt.planner.hlo.text import Module
from jgt.replacements.replicas import BLOCK, Replicas, block_groups

SIZES = {"pod": 2, "fsdp": 4}
RNG = np.random.default_rng(0)
TREE = {
    "kernel": RNG.normal(size=(2, 64, 48)).astype(np.float32),
    "table": RNG.normal(size=(2, 33, 16)).astype(np.float32),
    "scale": RNG.normal(size=(2, 8)).astype(np.float32),
}


@pytest.fixture(scope="module")
def replicas():
    return Replicas(mesh=jgt.make_mesh(SIZES), axes=("pod",), batch=("pod", "fsdp"))


@pytest.fixture(scope="module")
def places(replicas):
    specs = {"kernel": PartitionSpec("fsdp"), "table": PartitionSpec(), "scale": PartitionSpec()}
    return {name: NamedSharding(replicas.mesh, spec) for name, spec in specs.items()}


def compiled(replicas, places, wire, tree=TREE):
    there = jax.device_put(tree, {name: replicas.lift(place) for name, place in places.items()})
    run = jax.jit(lambda tree: replicas.exchange(tree, places, wire), out_shardings=places)
    return run.lower(there).compile(), there


@pytest.mark.parametrize(("wire", "tolerance"), [("f32", 1e-6), ("bf16", 0.05), ("int8", 0.07)])
def test_sums_and_the_axes_that_they_cross(replicas, places, wire, tolerance):
    run, there = compiled(replicas, places, wire)
    sums = run(there)
    for name, x in TREE.items():
        assert sums[name].dtype == jnp.float32
        np.testing.assert_allclose(sums[name], x.sum(0), rtol=0, atol=tolerance)
        # All devices that hold the same part hold the same bits.
        held = {}
        for shard in sums[name].addressable_shards:
            np.testing.assert_array_equal(held.setdefault(str(shard.index), np.asarray(shard.data)), shard.data)
    found = collectives(Module.parse(run.as_text()), in_loops=False)
    assert {axes_of(c, SIZES) for c in found} == {frozenset({"pod"})}
    # Text of the compiled program, because JAX could move a conversion to the other side of a collective.
    assert {c.kind for c in found if "s8" in str(c.arrays)} == ({"all-to-all", "all-gather"} if wire == "int8" else set())


def test_an_exchange_in_int8_errs_by_less_than_two_roundings_of_a_block(replicas, places):
    run, there = compiled(replicas, places, "int8")
    sums = run(there)
    largest = max(float(np.abs(x).max()) for x in (*TREE.values(), *(x.sum(0) for x in TREE.values())))
    error = max(float(np.abs(sums[name] - x.sum(0)).max()) for name, x in TREE.items())
    assert 0 < error <= (2 * 0.5 + 0.5) * largest / 127 * 1.001
    # It fills no block, and travels in f32.
    np.testing.assert_allclose(sums["scale"], TREE["scale"].sum(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_on_the_other_side(replicas, places, bad):
    tree = {name: x.copy() for name, x in TREE.items()}
    tree["kernel"][1, 3, 5] = bad
    run, there = compiled(replicas, places, "int8", tree)
    sums = run(there)
    assert not np.isfinite(np.asarray(sums["kernel"])[3, 5])
    assert np.isfinite(np.asarray(sums["table"])).all()


def test_zeros_stay_zero(replicas, places):
    run, there = compiled(replicas, places, "int8", {name: np.zeros_like(x) for name, x in TREE.items()})
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(run(there)))


def test_arrays_share_blocks_if_they_are_split_over_the_same_axes(replicas, places):
    leaves, order = jax.tree.leaves(TREE), sorted(TREE)
    groups = block_groups(leaves, jax.tree.leaves(places))
    assert [[order[i] for i in group] for group in groups] == [["kernel"], ["table"]]
    assert TREE["scale"][0].size < BLOCK
