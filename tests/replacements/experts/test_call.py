"""`jgt.signal.experts` without a mesh: the same numbers as every expert on every row, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest
from expert_mixture import every_expert, ffn, loss_of, make, mixed, worst

from jgt import signal


@pytest.mark.parametrize(("count", "choose"), [(4, 1), (5, 2), (16, 4)])
@pytest.mark.parametrize("bias", [0.0, 9.0])
def test_rows_go_through_the_experts_chosen_for_them(count, choose, bias):
    params, x = make(jax.random.key(0), count, 16, 24), jax.random.normal(jax.random.key(1), (4, 8, 16))
    # With a bias, all rows choose the last expert, and some choose no other one.
    bias = bias * jnp.arange(count)
    run, wanted = (jax.jit(jax.value_and_grad(loss_of(layer, choose, bias), argnums=(0, 1))) for layer in (mixed, every_expert))
    assert worst(run(params, x), wanted(params, x)) < 2e-6


@pytest.mark.slow
def test_it_can_be_vmapped():
    scales, x = jnp.arange(1.0, 4.0), jax.random.normal(jax.random.key(1), (2, 5, 8))
    choice = jnp.array([[[0, 1], [2, 0], [1, 1], [0, 2], [2, 2]]] * 2)

    def scaled(rows, sizes, scales):
        return rows * jnp.repeat(scales, sizes, total_repeat_length=rows.shape[0])[:, None]

    found = jax.vmap(lambda x, choice: signal.experts(scaled, scales, x, choice, jnp.ones(choice.shape)))(x, choice)
    assert worst(found, x * jnp.sum(scales[choice], axis=-1, keepdims=True)) < 1e-6


def call(fn=ffn, weights=None, x=(6, 4), choice=(6, 2), dtype=jnp.int32):
    weights = {"gate": jnp.ones((3, 4, 5)), "up": jnp.ones((3, 4, 5)), "down": jnp.ones((3, 5, 4))} if weights is None else weights
    return signal.experts(fn, weights, jnp.ones(x), jnp.zeros(choice, dtype), jnp.ones(choice))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weights": {"up": jnp.ones((3, 4, 5)), "down": jnp.ones((2, 5, 4))}}, r"one number of experts, not \[2, 5, 4\], \[3, 4, 5\]"),
        ({"weights": {}}, "one number of experts, not none"),
        ({"choice": (5, 2)}, r"not \[6, 4\], \[5, 2\] and \[5, 2\]"),
        ({"dtype": jnp.float32}, "an integer type, not float32"),
        ({"choice": (6, 4)}, "chooses 4 of 3 experts"),
        ({"fn": lambda rows, sizes, weights: rows[:3]}, r"returns \[3, 4\] for 8 rows"),
        ({"fn": lambda rows, sizes, weights: rows * jnp.arange(4.0)[None]}, ""),
    ],
)
def test_wrong_arguments_are_refused(wrong, said):
    if said:
        with pytest.raises(ValueError, match=said):
            call(**wrong)
    else:
        call(**wrong)


def test_a_function_that_closes_over_arrays_is_refused():
    scale = jnp.ones((4,))
    with pytest.raises(ValueError, match=r"<lambda> closes over an array \[4\].*Pass its arrays as weights"):
        call(lambda rows, sizes, weights: rows * scale[None, :])
    with pytest.raises(ValueError, match="closes over a value of the trace around it"):
        jax.jit(lambda scale: call(lambda rows, sizes, weights: rows * scale[None, :]))(scale)
