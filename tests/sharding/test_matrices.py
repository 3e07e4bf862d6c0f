"""Functions of whole matrices: the same values on every layout, and each matrix on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jgt
from jgt.program.dims import partition_spec
from jgt.sharding.matrices import on_whole_matrices, spread_of

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def gram(x):
    return x @ x.mT @ x


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((3, 4, 6), ((), ("fsdp",), ("tensor",))),
        ((8, 4, 6), ((), ("tensor", "fsdp"), ())),
        ((6, 6, 4), (("data",), (), ("tensor",))),
        ((3, 2, 4, 6), ((), ("fsdp",), ("tensor",), ())),
        ((4, 6), (("fsdp",), ("tensor",))),
    ],
    ids=["padded", "one dim", "a split stack", "two stacked dims", "one matrix"],
)
def test_values_are_those_of_one_device(shape, dims):
    mesh = jgt.make_mesh(SIZES)
    sharding = NamedSharding(mesh, partition_spec(dims))
    x = jax.random.normal(jax.random.key(0), shape)
    there = jax.jit(lambda x: on_whole_matrices(gram, x, dims, mesh), in_shardings=sharding, out_shardings=sharding)(
        jax.device_put(x, sharding)
    )
    # Sums of at most six products, in another order.
    np.testing.assert_allclose(there, gram(x), rtol=1e-5, atol=1e-5)


def test_a_stack_goes_over_all_axes_that_can_share_it():
    assert spread_of((8, 4, 6), ((), ("fsdp",), ("tensor",)), SIZES).layouts == (
        ((), (), ("fsdp",), ("tensor",)),
        ((), ("data",), ("fsdp",), ("tensor",)),
        ((), ("data", "fsdp"), (), ("tensor",)),
        ((), ("data", "fsdp", "tensor"), (), ()),
    )


@pytest.mark.parametrize(("rows", "split", "padding"), [(8, 8, 0), (9, 8, 7), (4, 4, 0), (3, 4, 1), (2, 2, 0), (1, 1, 0)])
def test_no_more_devices_than_matrices_and_no_fewer(rows, split, padding):
    spread = spread_of((rows, 4, 6), ((), ("fsdp",), ()), SIZES)
    assert np.prod([SIZES[axis] for axis in spread.layouts[-1][1]], dtype=int) == split
    assert spread.padding == padding


def test_matrices_are_sent_and_not_gathered():
    mesh, dims = jgt.make_mesh({"fsdp": 8}), ((), ("fsdp",), ())
    sharding = NamedSharding(mesh, partition_spec(dims))
    step = jax.jit(lambda x: on_whole_matrices(gram, x, dims, mesh), in_shardings=sharding, out_shardings=sharding)
    plan = jgt.plan(step, jax.ShapeDtypeStruct((8, 16, 32), jnp.float32))
    assert [(c.kind, c.count) for c in plan.collectives] == [("all-to-all", 2)]
