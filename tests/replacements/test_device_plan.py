"""A region: what JAX sees of it is its meaning, and its plan is what runs. Also the facts of JAX that this relies on."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jgt
from jgt.planner.flops import flops
from jgt.program.equations import is_recomputed
from jgt.replacements.device_plan import MeaningPolicy, run_on_devices

MESH = {"data": 2, "tensor": 4}


@dataclass(frozen=True)
class Halves:
    """x [4, k], w [k, m] → x · w and x + 1; on the devices 1 and 2 are added, so that one can tell which of the two ran."""

    which: tuple[int, ...] = (0, 1)

    def meaning(self, x, w=None):
        return [x @ w if n == 0 else x + 1 for n in self.which]

    def on_device(self, x, w=None):
        return [x @ w + 1 if n == 0 else x + 2 for n in self.which]

    def axes(self):
        return frozenset({"tensor"})

    def layout(self, num_operands):
        return [((), ()), ((), ("tensor",))][:num_operands], [((), ("tensor",)) if n == 0 else ((), ()) for n in self.which]

    def pruned(self, used, num_operands):
        which = tuple(n for n, is_used in zip(self.which, used, strict=True) if is_used)
        return (Halves(which) if which else None), [0, *([1] if 0 in which else [])]


@pytest.fixture
def mesh():
    return jgt.make_mesh(MESH)


X, W = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((3, 8), np.float32)


def region(mesh):
    return lambda x, w: run_on_devices(Halves(), mesh, x, w)


def test_the_plan_runs_under_jit(mesh):
    # JAX takes the devices of a program from its arguments and constraints; a region has none until it is lowered.
    product, more = jax.jit(region(mesh))(jax.device_put(X, NamedSharding(mesh, P())), W)
    np.testing.assert_array_equal(product, X @ W + 1)
    np.testing.assert_array_equal(more, X + 2)


def test_the_plan_runs_inside_a_shard_map_over_other_axes(mesh):
    split = jax.shard_map(
        region(mesh), mesh=mesh, in_specs=(P("data"), P()), out_specs=[P("data")] * 2, axis_names={"data"}, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(split)(X, W)[0], X @ W + 1)


def test_flops_are_those_of_the_meaning(mesh):
    assert sum(f.executed for f in flops(jax.make_jaxpr(region(mesh))(X, W))) == 2 * X.size * 8


def test_vmap_and_second_derivatives_take_the_meaning(mesh):
    np.testing.assert_array_equal(jax.jit(jax.vmap(region(mesh), (0, None)))(X[None], W)[0][0], X @ W)
    tangent = jax.jit(lambda x: jax.jvp(lambda x: run_on_devices(Halves(), mesh, x, W)[0], (x,), (x,))[1])(X)
    np.testing.assert_array_equal(tangent, X @ W)


def test_the_plan_of_each_replica_runs_under_a_vmap_over_other_axes(mesh):
    both = jax.jit(jax.vmap(region(mesh), (0, None), spmd_axis_name="data"))
    rows = jax.device_put(np.stack([X, 2 * X]), NamedSharding(mesh, P("data")))
    product, more = both(rows, W)
    np.testing.assert_array_equal(product, np.stack([X, 2 * X]) @ W + 1)
    np.testing.assert_array_equal(more, rows + 2)
    # Of three entries, two devices would not have one each.
    alone = jax.jit(jax.vmap(region(mesh), (0, None), spmd_axis_name="data"))(np.stack([X, X, X]), W)[0]
    np.testing.assert_array_equal(alone[2], X @ W)


def test_results_that_nothing_reads_are_not_computed(mesh):
    def used(fn):
        traced = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sum(fn(x))))(X)
        inner = traced.eqns[0].params["jaxpr"]
        from jax._src.interpreters import partial_eval

        new, _ = partial_eval.dce_jaxpr(getattr(inner, "jaxpr", inner), [True])
        return [(e.params["plan"].which, len(e.invars)) for e in new.eqns if e.primitive.name == "on_devices"]

    assert used(lambda x: region(mesh)(x, W)[1]) == [((1,), 1)]
    assert used(lambda x: region(mesh)(x, jnp.sin(W))[0]) == [((0,), 2)]
    assert used(lambda x: x) == []


def test_a_policy_is_asked_about_the_matmul(mesh):
    equation = next(e for e in jax.make_jaxpr(region(mesh))(X, W).eqns)
    dots = jax.checkpoint_policies.dots_saveable
    assert MeaningPolicy(dots)(equation.primitive, *[v.aval for v in equation.invars], **equation.params) is True
    nothing = jax.checkpoint_policies.nothing_saveable
    assert MeaningPolicy(nothing)(equation.primitive, *[v.aval for v in equation.invars], **equation.params) is False
    # Anything else is for the policy itself.
    dot = jax.make_jaxpr(lambda x, w: x @ w)(X, W).eqns[-1]
    assert MeaningPolicy(dots)(dot.primitive, *[v.aval for v in dot.invars], **dot.params) is True
    assert [is_recomputed(policy, dot) for policy in (None, nothing, dots)] == [True, True, False]
