"""The bytes that a device sends in collectives of shard_map, by the ring algorithms."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jgt.planner.needs.equations import Backend, is_gather, sent
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.tracing import trace

SIZES = {"data": 2, "tensor": 4, "alone": 1}
X = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
NUM_BYTES = 8 * 16 * 2


def collectives(fn):
    """The equations of a function's shard_map, over all axes."""
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    program, _ = trace(mapped, X)
    (outer,) = jx.body(program).eqns
    (inner,) = subprograms(outer)
    return jx.body(inner).eqns


@pytest.mark.parametrize(
    ("fn", "axes", "rings"),
    [
        (lambda x: jax.lax.psum(x, "tensor"), ("tensor",), Fraction(2 * 3, 4)),
        (lambda x: jax.lax.psum(x, ("tensor", "data")), ("data", "tensor"), Fraction(2 * 7, 8)),
        (lambda x: jax.lax.all_gather(x, "tensor"), ("tensor",), Fraction(3)),
        (lambda x: jax.lax.psum_scatter(x, "tensor", tiled=True), ("tensor",), Fraction(3, 4)),
        (lambda x: jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True), ("tensor",), Fraction(3, 4)),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), ("data",), Fraction(1)),
    ],
    ids=["sum", "sum over two axes", "gather", "scatter", "exchange", "send"],
)
def test_each_collective_sends_its_ring(fn, axes, rings):
    (equation,) = collectives(fn)
    assert sent(equation, SIZES, Backend(is_gpu=True)) == (axes, NUM_BYTES * rings)
    # Every float travels in four bytes.
    assert sent(equation, SIZES, Backend(is_gpu=False)) == (axes, 2 * NUM_BYTES * rings)
    assert is_gather(equation) == (rings == 3)


def test_over_one_device_and_without_a_collective_nothing_is_sent():
    summed, doubled = collectives(lambda x: jax.lax.psum(x, "alone") * 2)[-2:]
    assert sent(summed, SIZES, Backend(is_gpu=True)) is None
    assert sent(doubled, SIZES, Backend(is_gpu=True)) is None
