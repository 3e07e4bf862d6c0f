"""Small programs are recognised as sums over their batch, as means, or as neither."""

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax.linalg import householder_product, triangular_solve, tridiagonal_solve
from jax.scipy.sparse.linalg import cg

from jgt.pipeline import batch
from jgt.pipeline.batch.derivatives import cotangent_extent, is_gradient_extent
from jgt.pipeline.batch.extent import INDEPENDENT, Extent, constant_extent
from jgt.pipeline.batch.rows import Rows
from jgt.program.parts import flatten
from jgt.program.tracing import trace
from jgt.signal import context

SIZES = (4, 8)


def growth_of(fn, trusted=()):
    """The growth of fn(x, w) for rows x [b, 3] and a weight w [3], and the variable of its result."""
    shapes = [(jax.ShapeDtypeStruct((n, 3), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)) for n in SIZES]
    # Calls are not dissolved, so that jits are walked like other regions.
    whole, larger = (flatten(trace(fn, *shape)[0], lambda equation: False) for shape in shapes)
    return batch.growth_of(whole, larger, ratio=2, num_params=0, trusted=trusted), whole.outvars[0]


def extent_of(fn, trusted=()):
    growth, result = growth_of(fn, trusted)
    return growth.of(result)


NUMBERS = {
    "a sum": (lambda x, w: jnp.sum(x), 1, True),
    "a mean": (lambda x, w: jnp.mean(x), 0, True),
    "a mean times its number": (lambda x, w: jnp.mean(x) * len(x), 1, True),
    "a sum of means": (lambda x, w: jnp.mean(x) + jnp.mean(jnp.exp(x)), 0, True),
    "a mean of shares": (lambda x, w: jnp.sum(x / len(x)), 0, True),
    "a mean and a weight": (lambda x, w: jnp.mean(x) + jnp.sum(w), 0, True),
    "a product with a weight": (lambda x, w: jnp.sum(x) * jnp.sum(w), 1, True),
    "a matrix": (lambda x, w: x.T @ x, 1, True),
    "a product of sums": (lambda x, w: jnp.sum(x) * jnp.sum(x), 2, False),
    "a product of means": (lambda x, w: jnp.mean(x) * jnp.mean(x), 0, False),
    "a quotient of sums": (lambda x, w: jnp.sum(x) / jnp.sum(x**2), 0, False),
    "a function of a mean": (lambda x, w: jnp.sqrt(jnp.mean(x)), 0, False),
    "a rounded mean": (lambda x, w: jnp.mean(x).astype(int), 0, False),
    "a cast mean": (lambda x, w: jnp.mean(x).astype(jnp.bfloat16), 0, True),
    "a choice by a mean": (lambda x, w: w[jnp.mean(x > 0).astype(int)], 0, False),
    "a histogram": (lambda x, w: jnp.zeros(9).at[x[:, 0].astype(int)].add(1.0), 1, True),
    "a sum of both halves": (lambda x, w: sum(jnp.sum(half) for half in jnp.split(jnp.concatenate([x, -x]), 2)), 1, True),
    "a loop": (lambda x, w: jax.lax.fori_loop(0, 3, lambda i, total: total + jnp.sum(x * i), 0.0), 1, True),
    "a branch": (lambda x, w: jax.lax.cond(w[0] > 0, jnp.sum, lambda x: jnp.sum(x**2), x), 1, True),
    "a count": (lambda x, w: jnp.sum(jnp.ones(len(x))), 1, True),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    fn, degree, exact = NUMBERS[name]
    found = extent_of(fn)
    assert (found.rows, found.problem, found.of_batch) == (None, "", True)
    assert (found.degree, found.exact) == (degree, exact)


NEITHER = {
    "a whole quotient": lambda x, w: jax.lax.div(jnp.sum(x.astype(int)), len(x)),
    "a maximum": lambda x, w: jnp.max(x),
    "a sum and a weight": lambda x, w: jnp.sum(x) + jnp.sum(w),
    "a root of a sum": lambda x, w: jnp.sqrt(jnp.sum(x)),
    "python's sum of a weight": lambda x, w: jnp.sum(x) + sum([jnp.sum(w)]),
    "a histogram on top of weights": lambda x, w: w.at[x[:, 0].astype(int)].add(1.0),
    "a place": lambda x, w: jnp.sum(x * jnp.arange(len(x))[:, None]),
    "an update by a scan": lambda x, w: jax.lax.scan(lambda total, row: (total * 0.5 + jnp.sum(row), None), 0.0, x)[0],
    "branches that differ": lambda x, w: jax.lax.cond(w[0] > 0, jnp.sum, jnp.mean, x),
}


@pytest.mark.parametrize("name", NEITHER)
def test_neither_sums_nor_means(name):
    assert extent_of(NEITHER[name]).problem


ZERO = {
    "zeros": (lambda x, w: jnp.zeros(3), True),
    "zeros for each row": (lambda x, w: jnp.sum(jnp.zeros(len(x))), True),
    "zero times a weight": (lambda x, w: jnp.zeros(3) * w, True),
    "zero and zero": (lambda x, w: jnp.concatenate([jnp.zeros(3), jnp.zeros(2)]), True),
    "zero and a weight": (lambda x, w: 0 + w, False),
    "a weight and zero": (lambda x, w: w - jnp.zeros(3), False),
    "either": (lambda x, w: jnp.where(w > 0, 0.0, w), False),
    "padded with something else": (lambda x, w: jnp.pad(jnp.zeros(3), 1, constant_values=2), False),
    "cosine": (lambda x, w: jnp.cos(jnp.zeros(3)), False),
}


@pytest.mark.parametrize("name", ZERO)
def test_zero(name):
    fn, zero = ZERO[name]
    found = extent_of(fn)
    assert (found.zero, found.problem, found.degree) == (zero, "", 0)


ROWS = {
    "rows": (lambda x, w: jnp.exp(x) * w[None], Rows(0)),
    "flat tokens": (lambda x, w: x.reshape(-1), Rows(0)),
    "heads first": (lambda x, w: x.T, Rows(1)),
    "heads folded before rows": (lambda x, w: x.T.reshape(-1), Rows(0, 3)),
    "and back": (lambda x, w: x.T.reshape(-1).reshape(3, -1).T, Rows(0)),
    "twice": (lambda x, w: jnp.concatenate([x, x]), Rows(0, 2)),
    "half of twice": (lambda x, w: jnp.split(jnp.concatenate([x, x]), 2)[1], Rows(0)),
    "pairs of neighbours": (lambda x, w: x.reshape(-1, 2, 3), Rows(0)),
    "one of each pair": (lambda x, w: x[::2], Rows(0)),
    "stacked by a scan": (lambda x, w: jax.lax.scan(lambda carry, k: (carry, x * k), None, w)[1], Rows(1)),
    "a constant for each row": (lambda x, w: jnp.ones((len(x), 2)), Rows(0, 0)),
    "a mask of a batch by segments": (lambda x, w: x[:, :, None] == x[:, None], Rows(0)),
    "places": (lambda x, w: jnp.arange(len(x))[:, None], Rows(0, 0, "place")),
    "by place": (lambda x, w: x[jnp.arange(len(x)), x[:, 0].astype(int)], Rows(0)),
    "into their place": (lambda x, w: x.at[jnp.arange(len(x)), x[:, 0].astype(int)].set(0.0), Rows(0)),
    "of a table": (lambda x, w: w[x.astype(int)], Rows(0)),
    "a weight for each row": (lambda x, w: jnp.tile(w[None], (len(x), 2)), Rows(0, 0)),
    "several entries for each row": (lambda x, w: jnp.tile(w, len(x)), Rows(0)),
    "tiled rows": (lambda x, w: jnp.tile(x, (2, 1)), Rows(0, 2)),
    "another dim tiled": (lambda x, w: jnp.tile(x, (1, 2)), Rows(0)),
    "equal rows, one after the other": (lambda x, w: jnp.broadcast_to(w, x.shape).reshape(-1), Rows(0)),
    "a reshape that transposes": (lambda x, w: jax.lax.reshape(x, (x.size,), dimensions=(1, 0)), Rows(0, 3)),
    "rows behind a barrier": (lambda x, w: jax.lax.optimization_barrier((x, w))[0], Rows(0)),
    "a weight behind a barrier": (lambda x, w: jax.lax.optimization_barrier((x, w))[1], None),
    "a weight that is put elsewhere": (lambda x, w: jax.device_put((x, w))[1], None),
    "a matrix of each row": (lambda x, w: jnp.linalg.solve(covariances(x), x[..., None]), Rows(0)),
    "an inverse of each row": (lambda x, w: jnp.linalg.inv(covariances(x)), Rows(0)),
    "a determinant of each row": (lambda x, w: jnp.linalg.slogdet(covariances(x))[1], Rows(0)),
    "rows in a weight's system": (lambda x, w: jnp.linalg.solve(jnp.diag(w), x.T), Rows(1)),
    "rows in a triangle from the right": (lambda x, w: triangular_solve(jnp.diag(w), x), Rows(0)),
    "rows in a band": (lambda x, w: tridiagonal_solve(w, w, w, x.T), Rows(1)),
    "a band of each row": (lambda x, w: tridiagonal_solve(x, x, x, x[..., None]), Rows(0)),
    "reflections of each row": (lambda x, w: householder_product(x[..., None], x[:, :1]), Rows(0)),
    "a system of each row, by iterations": (lambda x, w: jax.vmap(lambda row: cg(lambda y: y * w**2, row, maxiter=3)[0])(x), Rows(0)),
    "a kernel of each row": (lambda x, w: jax.vmap(lambda row: jnp.convolve(row, row, mode="same"))(x), Rows(0)),
    "collectives over a mapped dim": (lambda x, w: over_columns(lambda c: c - jax.lax.pmean(c, "i") + jax.lax.pmax(c, "i"), x), Rows(0)),
    "a rule of its own for vmap": (lambda x, w: doubled(x), Rows(0)),
}


def covariances(x):
    return x[:, :, None] * x[:, None] + jnp.eye(3)[None]


def over_columns(fn, x):
    return jax.vmap(fn, in_axes=1, out_axes=1, axis_name="i")(x)


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


doubled.def_vmap(lambda size, batched, x: (2 * x, batched[0]))


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    fn, rows = ROWS[name]
    found = extent_of(fn)
    assert (found.rows, found.problem) == (rows, "")


MIXED = {
    "equal rows in columns": lambda x, w: jnp.broadcast_to(w, x.shape).reshape(-1).reshape(3, -1),
    "equal rows of several entries in two copies": lambda x, w: jnp.tile(x[:, 0], 2) + jnp.broadcast_to(w[:2], (len(x), 2)).reshape(-1),
    "a reshape that transposes, and back": lambda x, w: jax.lax.reshape(x, (x.size,), dimensions=(1, 0)).reshape(x.shape),
    "half of a weight for each row": lambda x, w: jnp.tile(w[:2], len(x) // 2),
    "several entries for each of two copies": lambda x, w: jnp.tile(x[:, 0], 2) + jnp.tile(w[:2], len(x)),
    "rows of a weight": lambda x, w: jnp.linalg.cholesky(jnp.ones((9, 9)))[: len(x)],
    "a solution that mixes": lambda x, w: solved(lambda _, b: b[::-1] / 2, lambda _, b: b / 2, x),
    "a transposed solution that mixes": lambda x, w: solved(lambda _, b: b / 2, lambda _, b: b[::-1] / 2, x),
    "an iteration until all rows fit": lambda x, w: cg(lambda y: y * w[None] ** 2, x, maxiter=3)[0],
    "rows as features": lambda x, w: jax.lax.conv(x[None], jnp.ones((1, len(x), 1)), (1,), "SAME"),
    "a collective over rows": lambda x, w: jax.vmap(lambda row: row - jax.lax.pmax(row, "i"), axis_name="i")(x),
}


def solved(solve, transpose_solve, x):
    return jax.lax.custom_linear_solve(lambda y: 2 * y, x, solve, transpose_solve)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed(name):
    growth, result = growth_of(lambda x, w: jnp.sum(MIXED[name](x, w)))
    assert growth.of(result).problem or growth.feeds


def test_what_passes_a_barrier_is_as_exact_as_before():
    assert extent_of(lambda x, w: jax.lax.optimization_barrier((jnp.mean(x), x))[0]) == extent_of(lambda x, w: jnp.mean(x))
    growth, _ = growth_of(lambda x, w: jnp.sum(jax.lax.optimization_barrier((x, jnp.mean(x)))[0]))
    assert not growth.feeds


def test_rows_have_degrees_too():
    assert extent_of(lambda x, w: (x / len(x))[jnp.arange(len(x)), 0]).degree == -1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: jnp.sum(x * jnp.mean(x)),
        lambda x, w: jnp.sum(jax.lax.cond(jnp.any(x > 0), jnp.sin, jnp.cos, x)),
        lambda x, w: jnp.sum(jax.lax.dynamic_slice_in_dim(x, jnp.max(x).astype(int), 1, axis=1)),
    ],
)
def test_what_is_fed_back_is_found(fn):
    growth, _ = growth_of(fn)
    assert [growth.of(feed.var).of_batch for feed in growth.feeds] == [True]


def test_what_is_fed_into_a_region_is_known_outside_of_it():
    growth, _ = growth_of(lambda x, w: jax.checkpoint(lambda x, mean: jnp.sum(x * mean))(x, jnp.mean(x)))
    ((feed,), (extent,)) = growth.feeds, [growth.of(feed.var) for feed in growth.feeds]
    assert extent == Extent(of_batch=True)
    assert feed.var in growth.extents


def test_signals_that_are_trusted():
    def fn(x, w):
        with context("balance"):
            return jnp.mean(x) * jnp.max(x[::-1] - jnp.mean(x))

    assert extent_of(fn).problem
    assert extent_of(fn, ("balance",)) == Extent(of_batch=True)
    assert extent_of(fn, ("other",)).problem


def test_a_plain_sum_stays_one_where_it_is_trusted():
    def fn(x, w):
        with context("balance"):
            return jnp.sum(x)

    assert extent_of(fn, ("balance",)).degree == 1


CONSTANTS = [
    (3.0, 3.0, INDEPENDENT),
    (0, 0, Extent(zero=True)),
    (4, 8, Extent(degree=1)),
    (1 / 4, 1 / 8, Extent(degree=-1)),
    (16, 64, Extent(degree=2)),
    (float("nan"), float("nan"), INDEPENDENT),
    (1j, 1j, INDEPENDENT),
    (np.array([4, 8]), np.array([8, 16]), Extent(degree=1)),
    (np.zeros(3), np.zeros(3), Extent(zero=True)),
    (np.full(4, 2), np.full(8, 2), Extent(Rows(0, 0))),
    (np.arange(4), np.arange(8), Extent(Rows(0, 0, "place"))),
]


@pytest.mark.parametrize(("value", "other", "extent"), CONSTANTS, ids=str)
def test_constants(value, other, extent):
    assert constant_extent(value, other, SIZES) == extent


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (3, 7),
        (0, 1),
        (-4, 8),
        (1j, 2j),
        (float("nan"), 1.0),
        (np.array([4, 3]), np.array([8, 3])),
        (np.arange(4.0) ** 2, np.arange(8.0) ** 2),
    ],
    ids=str,
)
def test_constants_that_are_no_power_of_the_batch(value, other):
    assert constant_extent(value, other, SIZES).problem


@pytest.mark.parametrize("degree", [-1, 0, 1])
def test_the_cotangent_of_a_number_has_the_extent_of_a_gradient(degree):
    """A number of degree d times its cotangent is a part of the loss, which has degree 1."""
    number = Extent(degree=degree)
    assert cotangent_extent(number).degree + degree == 1
    assert is_gradient_extent(cotangent_extent(number), number)
