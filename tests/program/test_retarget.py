"""Programs that were traced on CPU devices, planned for GPUs: whatever stands inside a shard_map names the kind of device."""

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AbstractMesh, NamedSharding
from plugin import needs_plugin

import jgt
from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from jgt.planner.plan import plan
from jgt.program.retarget import meshes_in, replace_mesh

pytestmark = needs_plugin
GPUS = "h100:1x8"


def made_of_nothing(x):
    return x + jnp.zeros((1, 4), x.dtype).at[:, jnp.arange(2)].add(1.0)


def in_loops(x):
    first = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + jnp.zeros(4)), (0, jnp.ones(4)))[1]
    scanned = jax.lax.scan(lambda c, row: (c + row * jnp.arange(4), jnp.ones(2)), jnp.zeros(4), x)
    return x + (first + scanned[0])[None] + jnp.sum(scanned[1])


def in_calls(x):
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, jnp.ones(())), lambda one, c: (c * one + jnp.zeros((1, 4)),))
    taken = jax.lax.cond(jnp.sum(x) > 0, lambda x: x + jnp.arange(4)[None], jnp.zeros_like, x)
    return doubled(jax.jit(lambda x: x * jnp.eye(4)[:1])(taken))


def in_another(x):
    return jax.shard_map(made_of_nothing, in_specs=P("tensor"), out_specs=P("tensor"), axis_names={"tensor"}, check_vma=False)(x)


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("local", [made_of_nothing, in_loops, in_calls, in_another])
def test_a_shard_map_of_the_users_is_planned_for_a_target(local, is_gradient):
    mesh = jgt.make_mesh({"data": 4, "tensor": 2})
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def fn(x):
        spec = P("data")
        return jnp.sum(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)(x) ** 2)

    found = plan(jax.grad(fn) if is_gradient else fn, x, target=GPUS)
    assert (found.target, found.devices) == (GPUS, 8)


def test_every_mesh_of_a_program_is_replaced():
    mesh = jgt.make_mesh({"data": 8})
    gpus = jgt.make_mesh({"data": 8}, devices=devices_of(Target.parse(GPUS)))
    program = jax.make_jaxpr(jax.shard_map(in_loops, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))(
        jnp.ones((16, 4))
    )
    kinds = {(m if isinstance(m, AbstractMesh) else m.abstract_mesh).abstract_device for m in meshes_in(replace_mesh(program, gpus))}
    assert kinds == {gpus.abstract_mesh.abstract_device}
    assert str(replace_mesh(program, gpus)) == str(program)
