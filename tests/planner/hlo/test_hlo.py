"""The helpers that query compiled programs, tested on programs with known answers."""

import jax
import jax.numpy as jnp
from hlo import axes_of, collectives, conditionals, sizes_of, sources
from jax.sharding import NamedSharding, PartitionSpec

import jgt
from jgt.planner.hlo.text import Module

MESH = {"data": 2, "stage": 2, "tensor": 2}


def read(fn, *args):
    """The compiled module of a function that runs with all mesh axes manual."""
    mesh = jgt.make_mesh(MESH)
    local = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    args = [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in args]
    return Module.parse(jax.jit(local).lower(*args).compile().as_text())


def test_collectives_inside_and_outside_of_loops():
    def fn(x):
        def inner(x, _):
            return jax.lax.psum(jnp.sin(x), "data"), None

        def outer(x, _):
            return jax.lax.ppermute(jax.lax.scan(inner, x, length=3)[0], "stage", [(0, 1), (1, 0)]), None

        return jax.lax.all_gather(jax.lax.scan(outer, x, length=3)[0], "tensor")

    module = read(fn, jnp.ones((4, 8)))
    looped, others = ([(i.kind, axes_of(i, MESH), sizes_of(i)) for i in collectives(module, in_loops=b)] for b in (True, False))
    assert sorted(looped) == [("all-reduce", {"data"}, [32]), ("collective-permute", {"stage"}, [32])]
    assert others == [("all-gather", {"tensor"}, [64])]


def branch(predicate):
    """The sources of the predicate in a loop that branches in every step."""

    def fn(x, table):
        def step(x, i):
            return jax.lax.cond(predicate(x, table, i), lambda x: jnp.sin(x @ x), lambda x: x, x), None

        return jax.lax.scan(step, x, jnp.arange(6))[0]

    module = read(fn, jnp.ones((8, 8)), jnp.array([True, False] * 3))
    (conditional,) = conditionals(module)
    return sources(module, module.operands(conditional)[0])


def test_a_predicate_of_a_constant_table():
    table = jnp.array([True, False, False] * 2)
    found = branch(lambda x, _, i: table[i])
    assert {"constant", "dynamic-slice"} <= found
    assert not found & {"argument", "partition-id", "all-reduce"}


def test_predicates_of_other_things():
    assert "partition-id" in branch(lambda x, _, i: jax.lax.axis_index("stage") == i)
    assert "argument" in branch(lambda x, table, i: table[i])
    assert {"argument", "all-reduce"} <= branch(lambda x, _, i: jax.lax.psum(x[0, 0], "data") > i)
