import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.tables import groups_of, lookup, sum_of_groups

TABLE = jax.random.normal(jax.random.key(0), (8, 3))
TOKENS = jax.random.randint(jax.random.key(1), (4, 5), 0, 8)
COTANGENT = jax.random.normal(jax.random.key(2), (4, 5, 3))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("groups", [(), (4,), (2, 2)])
def test_lookup_and_gradient_are_those_of_indexing(groups, wide):
    found, pull = jax.vjp(lambda table: lookup(table, TOKENS, groups, wide=wide), TABLE)
    expected, pull_expected = jax.vjp(lambda table: table[TOKENS], TABLE)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(*pull(COTANGENT), *pull_expected(COTANGENT), rtol=1e-6, atol=1e-6)


def test_a_wide_gradient_is_rounded_once():
    # In bf16, 256 + 1 is 256.
    tokens, cotangent = jnp.zeros((4, 1), jnp.int32), jnp.array([256.0, 1, 1, 1], jnp.bfloat16)[:, None, None]
    for groups in ((), (2, 2)):
        _, pull = jax.vjp(lambda table, groups=groups: lookup(table, tokens, groups, wide=True), jnp.zeros((1, 1), jnp.bfloat16))
        assert pull(cotangent)[0].item() == 260


@pytest.mark.parametrize(("groups", "dtype"), [((), "float32"), ((6,), "bfloat16"), ((3, 2), "float32"), ((2, 1, 3), "bfloat16")])
def test_sums_of_groups_keep_their_type(groups, dtype):
    x = jnp.arange(12 if groups else 2, dtype=dtype).reshape(-1, 2)
    found = sum_of_groups(x, groups)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.asarray(x, np.float32).sum(0))


def test_rows_that_groups_do_not_divide_are_one_group():
    assert [groups_of((2, 2), rows) for rows in (1, 4, 6, 8)] == [(), (2, 2), (), (2, 2)]
