"""The judge of drawn programs: no false alarm where rounding, ties or NaN explain a difference, and no planted fault missed."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from drawn import drawn

from jgt.conformance.judge import Judge, on_mesh, outcome_of
from jgt.conformance.program import DRAWS

ROWS = {"x0": (("a",), ())}
COLUMNS = {"x0": ((), ("a",))}


def on_devices(program, judge):
    return jax.jit(lambda arguments: outcome_of(program, arguments, on_mesh(program)))(judge.arguments)


@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "codes",
    [
        ["x0.sum(0)"],
        ["jnp.tanh(x0)", "v0 - v0.mean(0, keepdims=True)", "v1.sum(0)"],
        ["jax.nn.softmax(x0, 0)", "jnp.log(v0)"],
        ["x0 @ x0.T", "jnp.sort(v0, 1)"],
        ["jnp.tanh(x0)", "v0.sum(0)", "1 / (v1 - jnp.roll(v1, 1))"],
        ["jnp.cumsum(x0 * 0.3, 0)", "jnp.where(v0 == v0, v0, 0)"],
    ],
    ids=lambda codes: codes[-1],
)
@pytest.mark.parametrize("salt", [3, 5])
def test_sums_in_another_order_are_no_fault(codes, dtype, gradient, salt):
    program = drawn(*codes, dtype=dtype, specs=ROWS, mesh=(4,), gradient=gradient, salt=salt)
    for draw in DRAWS:
        judge = Judge(program, draw)
        assert judge.differences(on_devices(program, judge)) == []


def test_ties_that_rounding_breaks_are_no_fault():
    # Two rows are equal but for the order of their sums, so either may be the largest.
    program = drawn("jnp.tanh(x0)", "v0.sum(1) * 0 + v0[0].sum()", "jnp.argmax(v1)")
    judge = Judge(program, 1)
    wrong = {"value v2": np.int32(5)}
    assert judge.expected["value v2"] == 0
    assert [each.what for each in judge.differences(wrong)] == ["value v2"]
    unsure = drawn("jnp.tanh(x0)", "v0.sum(1) - v0[:, ::-1].sum(1)", "jnp.argmax(v1)")
    assert Judge(unsure, 1).differences(wrong) == []


def test_what_a_program_computes_is_compared_with_each_operation_by_itself():
    program = drawn("x0 * x0", gradient=True)
    judge = Judge(program, 1)
    x, cotangent = (np.asarray(judge.arguments[name], "f8") for name in ("x0", "c_v0"))
    np.testing.assert_allclose(judge.expected["value v0"], x * x, rtol=1e-6)
    np.testing.assert_allclose(judge.expected["gradient x0"], 2 * x * cotangent, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("draw", [0, 1])
def test_a_number_at_another_place_is_a_fault(dtype, draw):
    judge = Judge(drawn("jnp.sin(x0) if x0.dtype != jnp.int32 else x0", dtype=dtype), draw)
    found = {"value v0": np.roll(judge.expected["value v0"], 1, 0)}
    (difference,) = judge.differences(found)
    assert difference.what == "value v0" and difference.draw == draw and difference.error > 0.3


@pytest.mark.parametrize(("salt", "special"), [(3, np.isinf), (0, np.isnan)])
def test_a_lost_special_value_is_a_fault_and_one_that_spreads_is_none(salt, special):
    salt = next(n for n in range(salt, 100) if special(Judge(drawn("x0 + 1", salt=n), 2).expected["value v0"]).any())
    judge = Judge(drawn("x0 + 1", salt=salt), 2)
    right = judge.expected["value v0"]
    lost = {"value v0": np.where(np.isfinite(right), right, 0.0)}
    assert [each.error for each in judge.differences(lost)] == [np.inf]
    spread = right.copy()
    spread[~np.isfinite(right).any(1)] = np.nan
    spread[0, 0] = np.nan
    assert judge.differences({"value v0": spread}) == []
    from_numbers = Judge(drawn("x0 + 1"), 0)
    assert [each.error for each in from_numbers.differences({"value v0": np.full((8, 8), np.nan)})] == [np.inf]


def test_whole_numbers_are_compared_exactly_and_others_by_how_sure_they_are():
    exact, sure = Judge(drawn("x0.sum(0)"), 0), drawn("jnp.tanh(x0)", "v0.sum(0)")
    for judge in (exact, Judge(sure, 1)):
        right = next(iter(judge.expected.values()))
        (what,) = judge.expected
        assert judge.differences({what: right + 1e-6}) == []
        assert len(judge.differences({what: right + 0.1})) == 1
    # A difference of two sums that are equal may be anything, but not large.
    nothing = Judge(drawn("jnp.tanh(x0)", "(v0.sum() - v0[::-1].sum()) * 1e4"), 1)
    assert nothing.differences({"value v1": nothing.expected["value v1"] + 0.01}) == []


def test_a_product_of_zero_and_a_special_value_may_be_zero():
    program = drawn("x0 * (k0 > 3)[:, None]", indices={"k0": ((8,), 8)})
    judges = (Judge(replace(program, salt=salt), 2) for salt in range(200))
    rows = {judge: np.asarray(judge.arguments["k0"]) > 3 for judge in judges}
    special = {judge: ~np.isfinite(np.asarray(judge.arguments["x0"])).all(1) for judge in rows}
    judge = next(judge for judge in rows if (special[judge] & rows[judge]).any() and (special[judge] & ~rows[judge]).any())
    right, kept = judge.expected["value v0"], rows[judge][:, None]
    assert judge.differences({"value v0": np.where(kept, right, 0.0)}) == []
    assert [each.error for each in judge.differences({"value v0": np.where(kept, 0.0, right)})] == [np.inf]


def test_a_product_of_zero_and_the_infinity_of_an_empty_segment_may_be_zero():
    program = drawn("jax.ops.segment_min(x0[:, 0], k0, 4)", "jax.nn.one_hot(k0, 4) @ v0", indices={"k0": ((8,), 8)})
    judges = (Judge(replace(program, salt=salt), 0) for salt in range(200))
    judge = next(judge for judge in judges if np.isnan(judge.expected["value v1"]).all())
    least = np.asarray(jax.ops.segment_min(judge.arguments["x0"][:, 0], judge.arguments["k0"], 4))
    hot = np.asarray(jax.nn.one_hot(judge.arguments["k0"], 4)) > 0
    as_select = np.where(hot, least, 0).sum(1)
    assert judge.differences({"value v1": as_select}) == []
    wrong = Judge(drawn("x0 * 0 + jnp.where(k0 > 3, jnp.inf, 0.0)[:, None]", "v0 - v0[::-1]", indices={"k0": ((8,), 8)}), 0)
    lost = np.nan_to_num(wrong.expected["value v1"])
    assert [each.error for each in wrong.differences({"value v1": lost})] == [np.inf]


def test_what_is_compared_with_a_product_of_zero_and_an_infinity_may_be_that_of_zero():
    program = drawn("jax.nn.one_hot(k0, 8) @ x0[:, 0]", "v0 > x0[:, 0]", indices={"k0": ((8,), 8)})
    judges = (Judge(replace(program, salt=salt), 2) for salt in range(200))
    judge = next(judge for judge in judges if (np.isinf(x := judge.arguments["x0"][:, 0]) | np.isnan(x)).sum() == np.isinf(x).sum() == 1)
    x, k = np.asarray(judge.arguments["x0"])[:, 0], np.asarray(judge.arguments["k0"])
    chosen = np.where((k >= 0) & (k < 8), x[np.clip(k, 0, 7)], 0)
    assert judge.differences({"value v1": chosen > x}) == []
    assert judge.differences({"value v1": chosen <= x}) != []


def test_the_sign_of_a_zero_that_a_sort_sees_is_no_fault():
    program = drawn("lax.top_k(x0, 2)[0]", gradient=True)

    def gradient(judge, sign):
        _, pull = jax.vjp(lambda x: jax.lax.top_k((sign * x + 0) * sign, 2)[0], judge.arguments["x0"])
        return np.asarray(pull(judge.arguments["c_v0"])[0])

    judges = (Judge(replace(program, salt=salt), 0) for salt in range(200))
    judge = next(judge for judge in judges if (gradient(judge, 1) != judge.expected["gradient x0"]).any())
    assert judge.differences({"gradient x0": gradient(judge, 1)}) == []
    assert judge.differences({"gradient x0": np.roll(gradient(judge, 1), 1, 0)}) != []
