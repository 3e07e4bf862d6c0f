"""Both directions of a call of experts on one device: tokens to the experts, through them, and back, round by round.

Forward, rows go to their experts, and results come back to be added up. The backward pass is the same for the tokens and their cotangents
together: it computes the experts' results again, so that nothing but the arguments is kept. `dispatch` says how rows travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt.replacements.experts.call import ExpertCall
from jgt.replacements.experts.dispatch import AllToAll, LocalRows

MORE_ROUNDS = "jgt.more_rounds"
"""The named scope of the rounds after the first. A dot and their largest possible number follow."""


Dispatch = AllToAll | LocalRows


def run_forward(call: ExpertCall, dispatch: Dispatch, leaves: Sequence[jax.Array], x: jax.Array, scale: jax.Array) -> jax.Array:
    """The results [T, d'] of tokens [T, d] with scales [T, k]."""
    types: list[Any] = []

    def round_(number: Any) -> list[jax.Array]:
        one = dispatch.start(number)
        back = one.to_tokens(call.run(leaves, one.to_experts(x), one.sizes))
        types.append(back.dtype)
        return [jnp.einsum("tkd,tk->td", back, scale.astype(back.dtype), preferred_element_type=jnp.float32)]

    (y,) = _sum_of_rounds(dispatch, round_)
    return y.astype(types[0])


def run_backward(
    call: ExpertCall, dispatch: Dispatch, leaves: Sequence[jax.Array], x: jax.Array, scale: jax.Array, cotangent: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The gradients of the weights, of the tokens and of the scales, from the cotangent [T, d'] of the results."""
    types = x.dtype, scale.dtype

    def round_(number: Any) -> list[jax.Array]:
        one = dispatch.start(number)

        def run(rows: jax.Array, *leaves: jax.Array) -> jax.Array:
            return call.run(leaves, rows, one.sizes)

        rows, scales, behind = one.to_experts(x), one.to_experts(scale, by_choice=True), one.to_experts(cotangent)
        by_scale, (by_rows, *by_weights) = _pulled(run, rows, scales, behind, leaves)
        by_tokens = jnp.sum(one.to_tokens(by_rows), axis=1, dtype=jnp.float32)
        return [*by_weights, by_tokens, one.to_tokens(by_scale)]

    *by_weights, by_x, by_scale = _sum_of_rounds(dispatch, round_)
    return by_weights, by_x.astype(types[0]), by_scale.astype(types[1])


def _pulled(
    run: Callable[..., jax.Array], rows: jax.Array, scales: jax.Array, cotangent: jax.Array, leaves: Sequence[jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The gradients of scales [n], and of rows and weights, from the cotangent [n, d'] of the scaled results of rows [n, d]."""
    results, pull = cast("tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]", jax.vjp(run, rows, *leaves))
    by_scales = jnp.sum(results.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    return by_scales, pull((cotangent * scales[:, None].astype(cotangent.dtype)).astype(results.dtype))


def _sum_of_rounds(dispatch: Dispatch, round_: Callable[[Any], list[jax.Array]]) -> list[jax.Array]:
    # The first round is outside of the loop: with a balanced router it is the only one, and there XLA overlaps its sends with other work.
    first = round_(0)
    if dispatch.max_rounds == 1:
        return first
    rounds = dispatch.rounds

    def more(state: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        number, sums = state
        return number + 1, [total + new for total, new in zip(sums, round_(number), strict=True)]

    with jax.named_scope(f"{MORE_ROUNDS}.{dispatch.max_rounds - 1}"):
        return jax.lax.while_loop(lambda state: state[0] < rounds, more, (jnp.int32(1), first))[1]
