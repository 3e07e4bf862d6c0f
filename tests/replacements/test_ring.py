"""Rings of matmuls on 8 CPU devices: values, gradients and collectives against plain matmuls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jgt
from jgt.replacements.ring import Ring, gather_and_multiply, multiply_and_scatter

K = 8


def arrays(seq, widths):
    """rows [4, seq, K], weights [K, m] up and [m, K] down for each width m, in f32."""
    rng = np.random.default_rng(0)
    up = [rng.normal(size=(K, m)).astype(np.float32) for m in widths]
    down = [rng.normal(size=(m, K)).astype(np.float32) for m in widths]
    return rng.normal(size=(4, seq, K)).astype(np.float32), up, down


def block(gather, scatter):
    """A block of tensor parallelism as a loss: several matmuls up from the same rows, a nonlinearity, as many down, and a residual."""

    def loss(rows, up, down):
        hidden = [jnp.tanh(x) for x in gather(rows, *up)]
        return jnp.sum((rows + sum(scatter(x, w)[0] for x, w in zip(hidden, down, strict=True))) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


PLAIN = block(lambda rows, *weights: [rows @ w for w in weights], lambda rows, w: [rows @ w])


def rings(mesh, keeps):
    ring = Ring(axis="tensor", dim=1, rows=(("data",), (), ()))
    return block(gather_and_multiply(ring, mesh, keeps=keeps), multiply_and_scatter(ring, mesh))


def placed(mesh, rows, up, down):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    return put(rows, "data", "tensor"), [put(w, None, "tensor") for w in up], [put(w, "tensor") for w in down]


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))


@pytest.mark.parametrize("keeps", [True, False], ids=["rows kept", "rows fetched again"])
@pytest.mark.parametrize(
    ("sizes", "seq"),
    [
        ({"data": 2, "tensor": 4}, 16),
        # A part of one row has no halves.
        pytest.param({"data": 1, "tensor": 8}, 8, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2}, 6, marks=pytest.mark.slow),
        pytest.param({"data": 1, "tensor": 3}, 12, marks=pytest.mark.slow),
    ],
)
def test_equals_plain_matmuls(sizes, seq, keeps):
    mesh = jgt.make_mesh(sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])
    widths = (24, 48)
    assert_close(rings(mesh, keeps)(*placed(mesh, *arrays(seq, widths))), PLAIN(*arrays(seq, widths)))


def test_all_that_is_sent_goes_around_the_ring():
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})
    values = placed(mesh, *arrays(16, (24, 48)))
    text = rings(mesh, True).lower(*values).compile().as_text()
    kinds = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    # 3 sends bring all rows, and 6 send a sum in halves. Forward: one gather for both matmuls, and two sums. Backward: two gathers, and one
    # sum for both matmuls. The two gathers are of one array, and XLA merges what it can of them.
    assert 3 + 2 * 6 + 3 + 6 <= kinds.count("collective-permute") <= 3 + 2 * 6 + 2 * 3 + 6
    # The gradients of the weights and the loss are summed over data.
    assert set(kinds) <= {"collective-permute", "all-reduce"}


def test_sums_are_in_the_type_of_the_plain_matmul():
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})
    rows, up, _ = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays(16, (24,)))
    ring = Ring(axis="tensor", dim=1, rows=(("data",), (), ()), result=jnp.float32)
    results = jax.eval_shape(gather_and_multiply(ring, mesh, keeps=True), rows, *up)
    assert [x.dtype for x in results] == [jnp.float32]
    run = jax.vjp(gather_and_multiply(ring, mesh, keeps=True), rows, *up)[1]
    assert [x.dtype for x in jax.eval_shape(run, results)] == [jnp.bfloat16] * 2
