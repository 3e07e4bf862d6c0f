"""Both directions of a call of experts on one device: tokens to the experts, through them, and back, round by round.

Forward, rows go to their experts, and results come back to be added up. The backward pass is the same for the tokens and their cotangents
together: it computes the experts' results again, so that nothing but the arguments is kept. How rows travel is `rooms` or `whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from jgt.experts.call import ExpertCall

MORE_ROUNDS = "jgt.more_rounds"
"""The named scope of the rounds after the first, with a dot and the most that there can be."""


class Traffic(Protocol):
    """How the rows of a device's tokens meet the experts, round by round."""

    @property
    def rounds(self) -> Any:
        """The number of rounds."""
        ...

    @property
    def max_rounds(self) -> int:
        """The most that there can be."""
        ...

    def start(self, number: Any) -> Round:
        """A round."""
        ...

    def brought(self, x: jax.Array) -> jax.Array:
        """The array that rows are taken from, of an array [T, ...] of this device's tokens."""
        ...

    def finish(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """Sums over rounds, [tokens, ...], as the device's own tokens have them."""
        ...


class Round(Protocol):
    """One round: rows to the experts, and results back to the tokens."""

    @property
    def sizes(self) -> jax.Array:
        """The number of rows for each expert of this device."""
        ...

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """Values of tokens [T, ...], or of choices [T, k], as rows in the order of the experts."""
        ...

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """Rows in the order of the experts as [T, k, ...]; 0 for choices that are not of this round."""
        ...


def run_forward(call: ExpertCall, traffic: Traffic, leaves: Sequence[jax.Array], x: jax.Array, scale: jax.Array) -> jax.Array:
    """The results [T, d'] of tokens [T, d] with scales [T, k]."""
    x, scale = traffic.brought(x), traffic.brought(scale)
    types: list[Any] = []

    def round_(number: Any) -> list[jax.Array]:
        one = traffic.start(number)
        back = one.to_tokens(call.run(leaves, one.to_experts(x), one.sizes))
        types.append(back.dtype)
        return [jnp.einsum("tkd,tk->td", back, scale.astype(back.dtype), preferred_element_type=jnp.float32)]

    (y,) = _sum_of_rounds(traffic, round_)
    return traffic.finish([y.astype(types[0])])[0]


def run_backward(
    call: ExpertCall, traffic: Traffic, leaves: Sequence[jax.Array], x: jax.Array, scale: jax.Array, cotangent: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The gradients of the weights, of the tokens and of the scales, from the cotangent [T, d'] of the results."""
    types = x.dtype, scale.dtype
    x, scale, cotangent = traffic.brought(x), traffic.brought(scale), traffic.brought(cotangent)

    def round_(number: Any) -> list[jax.Array]:
        one = traffic.start(number)

        def run(rows: jax.Array, *leaves: jax.Array) -> jax.Array:
            return call.run(leaves, rows, one.sizes)

        rows, scales, behind = one.to_experts(x), one.to_experts(scale, by_choice=True), one.to_experts(cotangent)
        by_scale, (by_rows, *by_weights) = _pulled(run, rows, scales, behind, leaves)
        by_tokens = jnp.sum(one.to_tokens(by_rows), axis=1, dtype=jnp.float32)
        return [*by_weights, by_tokens, one.to_tokens(by_scale)]

    *by_weights, by_x, by_scale = _sum_of_rounds(traffic, round_)
    by_x, by_scale = traffic.finish([by_x.astype(types[0]), by_scale.astype(types[1])])
    return by_weights, by_x, by_scale


def _pulled(
    run: Callable[..., jax.Array], rows: jax.Array, scales: jax.Array, cotangent: jax.Array, leaves: Sequence[jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The gradients of scales [n], and of rows and weights, from the cotangent [n, d'] of the scaled results of rows [n, d]."""
    results, pull = cast("tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]", jax.vjp(run, rows, *leaves))
    by_scales = jnp.sum(results.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    return by_scales, pull((cotangent * scales[:, None].astype(cotangent.dtype)).astype(results.dtype))


def _sum_of_rounds(traffic: Traffic, round_: Callable[[Any], list[jax.Array]]) -> list[jax.Array]:
    # The first round is outside of the loop: with a balanced router it is the only one, and there XLA overlaps its sends with other work.
    first = round_(0)
    if traffic.max_rounds == 1:
        return first
    rounds = traffic.rounds

    def more(state: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        number, sums = state
        return number + 1, [total + new for total, new in zip(sums, round_(number), strict=True)]

    with jax.named_scope(f"{MORE_ROUNDS}.{traffic.max_rounds - 1}"):
        return jax.lax.while_loop(lambda state: state[0] < rounds, more, (jnp.int32(1), first))[1]
