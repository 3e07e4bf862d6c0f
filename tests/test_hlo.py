"""The reader of compiled programs, on programs of which the answers are known."""

import jax
import jax.numpy as jnp
import pytest
from hlo import Instruction, Module, spanned
from jax.sharding import NamedSharding, PartitionSpec

import jgt

MESH = {"data": 2, "stage": 2, "tensor": 2}
GROUPS = {
    "replica_groups={{0,2},{1,3},{4,6},{5,7}}": {"stage"},
    "replica_groups={{0,1,2,3},{4,5,6,7}}": {"stage", "tensor"},
    "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}": set(),
    "replica_groups=[4,2]<=[8]": {"tensor"},
    "replica_groups=[2,4]<=[8]": {"stage", "tensor"},
    "replica_groups=[4,2]<=[2,4]T(1,0)": {"data"},
    "replica_groups=[4,2]<=[2,2,2]T(0,2,1)": {"stage"},
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": {"data", "tensor"},
    "replica_groups=mesh['data'=2,'fsdp'=1,'stage'=2,'tensor'=2] {'stage'}": {"stage"},
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": {"data"},
    "replica_groups=mesh['a'=4,'b'=2] {'a','b'}": {"data", "stage", "tensor"},
    "source_target_pairs={{0,2},{4,6}}": {"stage"},
    "source_target_pairs={{0,1},{1,2}}": {"stage", "tensor"},
}


@pytest.mark.parametrize("text", GROUPS)
def test_the_axes_of_groups(text):
    collective = Instruction(name="x", op="all-reduce", shapes=(), operands=(), called=(), text=f"%y), channel_id=1, {text}, metadata={{}}")
    assert spanned(collective, MESH) == GROUPS[text]


def read(fn, *args):
    """The module of a function with all axes manual."""
    mesh = jgt.make_mesh(MESH)
    local = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    args = [jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in args]
    return Module.of(jax.jit(local).lower(*args).compile().as_text())


def test_what_stands_in_loops_and_what_does_not():
    def fn(x):
        def inner(x, _):
            return jax.lax.psum(jnp.sin(x), "data"), None

        def outer(x, _):
            return jax.lax.ppermute(jax.lax.scan(inner, x, length=3)[0], "stage", [(0, 1), (1, 0)]), None

        return jax.lax.all_gather(jax.lax.scan(outer, x, length=3)[0], "tensor")

    module = read(fn, jnp.ones((4, 8)))
    looped, others = ([(i.kind, spanned(i, MESH), i.sizes) for i in module.collectives(in_loops=b)] for b in (True, False))
    assert sorted(looped) == [("all-reduce", {"data"}, [32]), ("collective-permute", {"stage"}, [32])]
    assert others == [("all-gather", {"tensor"}, [64])]


def branch(predicate):
    """A loop in which every step branches."""

    def fn(x, table):
        def step(x, i):
            return jax.lax.cond(predicate(x, table, i), lambda x: jnp.sin(x @ x), lambda x: x, x), None

        return jax.lax.scan(step, x, jnp.arange(6))[0]

    module = read(fn, jnp.ones((8, 8)), jnp.array([True, False] * 3))
    ((computation, conditional),) = module.conditionals()
    return module.sources(computation, conditional.operands[0])


def test_a_predicate_of_a_constant_table():
    table = jnp.array([True, False, False] * 2)
    sources = branch(lambda x, _, i: table[i])
    assert {"constant", "dynamic-slice"} <= sources
    assert not sources & {"argument", "partition-id", "all-reduce"}


def test_predicates_of_other_things():
    assert "partition-id" in branch(lambda x, _, i: jax.lax.axis_index("stage") == i)
    assert "argument" in branch(lambda x, table, i: table[i])
    assert {"argument", "all-reduce"} <= branch(lambda x, _, i: jax.lax.psum(x[0, 0], "data") > i)
