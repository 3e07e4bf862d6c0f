"""What jgt relies on to know where an equation is, one test for each fact."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from nesting import X, only
from next_checkpoint import next_checkpoint

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.places import Place, manual_mesh, mesh_around, place_of, vmapped_axes
from jgt.program.tracing import trace
from jgt.signal import context


def test_a_place_counts_vmaps_and_signals():
    def fn(x):
        with context("a"):
            return jax.vmap(jax.vmap(lambda y: context("b")(jnp.sin)(y)))(x)

    equation = only(jax.make_jaxpr(fn)(jnp.ones((2, 2))), having="sin")
    place = place_of(equation, Place(("top",), 1))
    assert place == Place(("top", "a", "b"), 3)
    assert place.path == "top/a/b"
    assert place.inside(("top", "a"))
    assert not place.inside(("a",))


def test_derivatives_are_no_vmaps():
    program = jax.make_jaxpr(jax.jvp, static_argnums=0)(context("a")(jnp.sin), (X,), (X,))
    assert place_of(only(program, having="cos"), Place()) == Place(("a",), 0)


def test_the_backward_pass_of_a_recomputed_part_of_a_loop_is_in_its_signal_once():
    def loss(x):
        with context("layers"):
            return jnp.sum(jax.lax.scan(lambda x, w: (context("mlp")(jax.checkpoint(jnp.sin))(x) * w, None), x, jnp.ones(3))[0])

    def paths(program, around):
        for equation in jx.body(program).eqns:
            place = place_of(equation, around)
            yield place.path
            for inner in subprograms(equation):
                yield from paths(inner, place)

    # Some versions of JAX have equations outside of the signal, too.
    for is_next in (False, True):
        with next_checkpoint(is_next):
            assert set(paths(jax.make_jaxpr(jax.grad(loss))(X), Place())) - {""} == {"layers", "layers/mlp"}


def test_the_mesh_of_a_shard_map_is_known_inside_of_it():
    mesh = jgt.make_mesh({"data": 4, "tensor": 2})
    program, _ = trace(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}), jnp.ones(8))
    outer = only(program, having="jaxpr")
    inner = only(next(subprograms(outer)), having="sin")
    assert manual_mesh(outer) is None
    assert set(manual_mesh(inner).manual_axes) == {"data"}


def test_the_mesh_of_a_shard_map_is_known_while_it_is_traced():
    seen = []

    def look(x):
        seen.append(mesh_around())
        return x

    jax.make_jaxpr(
        jax.shard_map(look, mesh=jgt.make_mesh({"data": 4, "tensor": 2}), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    )(jnp.ones(8))
    look(0)
    assert set(seen[0].manual_axes) == {"data"}
    assert seen[1] is None


def test_the_axes_that_a_vmap_claims_are_known_inside_of_it():
    seen = []

    def look(x):
        seen.append(vmapped_axes())
        return x

    jax.vmap(look, spmd_axis_name="data")(np.zeros(4, np.float32))
    look(0)
    assert seen == [{"data"}, frozenset()]
