"""Rows on their way to the experts and back: `AllToAll` if the devices of an axis share the experts, `LocalRows` if each has them all.

A mesh axis of n devices splits the E experts and the tokens: each device holds E / n experts and T tokens. Each token goes through k
experts, so a device sends T · k rows. How many of them go to one device is known only when the program runs, but arrays have fixed
sizes. So each pair of devices has a *capacity* of

    C = capacity factor · T · k / n    rows

and an exchange is an all-to-all of an array [n, C, d]. If some pair has more rows than that, all devices run another round for the rows
that are left, and another one, until the fullest pair is served. The devices of the axis agree on the number of rounds by a maximum over
it. With a balanced router it is one. No row is dropped, and memory is needed for one round only, whatever the router chooses. With
`over: drop` the first round runs alone, and further rows are dropped.

A round, with 2 devices, 4 experts and C = 3, on device 0:

    rows by expert      a0 b0 c1 | d2 e3 f3 g3      the first three for experts of device 0
    sent, round 0       a0 b0 c1   d2 e3 f3         g3 waits for round 1
    received            a0 b0 c1   m0 n1 --         the second three from device 1; it had only two rows
    by expert           a0 b0 m0 | c1 n1 | --       what the model's function runs on
    sent back           in the order of `received`

Which rows a device gets from whom follows from one small all-to-all of counts.

`run_forward` and `run_backward` are the program of a device, round by round. The backward pass is the same for the tokens and their
cotangents together: it computes the experts' results again, so that nothing but the arguments is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgt.replacements.experts.call import ExpertCall, counts_of, inverse, sorted_by_expert

_Number = jax.Array | int
_TILE = 8
"""A capacity is a multiple of this, so that matmuls have whole tiles."""


def capacity_of(num_tokens: int, num_choices: int, num_devices: int, factor: float) -> int:
    """The number of rows that each pair of devices can exchange in a round."""
    wanted, most = (math.ceil(rows / _TILE) * _TILE for rows in (factor * num_tokens * num_choices / num_devices, num_tokens * num_choices))
    return min(wanted, most)


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """The rows of a device that has all experts: a single round, in which nothing is sent.

    order: the choices [T · k] by expert. place: the place of each choice in that order. sizes: the number of rows of each expert.
    """

    max_rounds: ClassVar[int] = 1
    rounds: ClassVar[int] = 1
    num_choices: int
    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, choice: jax.Array, num_experts: int) -> LocalRows:
        """The rows of choices [T, k]."""
        order, place, sizes = sorted_by_expert(choice, num_experts)
        return cls(num_choices=choice.shape[-1], order=order, place=place, sizes=sizes)

    def start(self, number: _Number) -> LocalRows:
        """The only round."""
        return self

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """Values of tokens [T, ...], or of choices [T, k], as rows in the order of the experts."""
        return x.reshape(-1)[self.order] if by_choice else x[self.order // self.num_choices]

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """Rows in the order of the experts as [T, k, ...]."""
        return rows[self.place].reshape(-1, self.num_choices, *rows.shape[1:])


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """The rows that the devices of an axis send each other.

    order: the choices [T · k] by expert. place: the place of each choice in that order. devices: the device of each choice's expert. begin:
    the place of the first choice for each device. pair: the number of choices for each device. received: the number of choices that each
    device [n] has for each expert [E / n] here.
    """

    axis: str
    capacity: int
    drops: bool
    num_choices: int
    order: jax.Array
    place: jax.Array
    devices: jax.Array
    begin: jax.Array
    pair: jax.Array
    received: jax.Array

    @classmethod
    def of(cls, choice: jax.Array, num_local: int, axis: str, factor: float, *, drops: bool) -> AllToAll:
        """The rows of choices [T, k], where each device has `num_local` experts. factor: the capacity factor."""
        n, (num_tokens, num_choices) = jax.lax.axis_size(axis), choice.shape
        flat = choice.reshape(-1).astype(jnp.int32)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        sizes = counts_of(flat, n * num_local).reshape(n, num_local)
        pair = jnp.sum(sizes, axis=1)
        return cls(
            axis=axis,
            capacity=capacity_of(num_tokens, num_choices, n, factor),
            drops=drops,
            num_choices=num_choices,
            order=order,
            place=inverse(order),
            devices=flat // num_local,
            begin=jnp.cumsum(pair) - pair,
            pair=pair,
            received=cast(jax.Array, jax.lax.all_to_all(sizes, axis, 0, 0, tiled=True)),
        )

    @property
    def rounds(self) -> jax.Array:
        """The number of rounds that the fullest pair of devices needs."""
        most = jax.lax.pmax(jnp.max(self.pair), self.axis)
        return -(-most // self.capacity)

    @property
    def max_rounds(self) -> int:
        """The largest number of rounds that there can be."""
        return 1 if self.drops else -(-self.order.size // self.capacity)

    def start(self, number: _Number) -> AllToAllRound:
        """The round with this number."""
        capacity, (n, num_local) = self.capacity, self.received.shape
        # The window of each source's rows that this round has, in their order by expert.
        ends = jnp.clip(jnp.cumsum(self.received, axis=1) - number * capacity, 0, capacity)
        starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        counts = ends - starts
        # The groups of rows on this device: by expert, then by source.
        before = (jnp.cumsum(counts.T.reshape(-1)) - counts.T.reshape(-1)).reshape(num_local, n).T
        slot = jnp.arange(capacity)[None, :]
        expert = jnp.sum(slot[:, :, None] >= ends[:, None, :], axis=-1)
        in_group = slot + jnp.take_along_axis(before - starts, jnp.minimum(expert, num_local - 1), axis=1)
        filled = ends[:, -1]
        empty = jnp.sum(filled) + jnp.cumsum(capacity - filled)[:, None] - (capacity - slot)
        grouped = jnp.where(expert < num_local, in_group, empty).reshape(-1)
        return AllToAllRound(rows=self, number=number, sizes=jnp.sum(counts, axis=0), grouped=grouped, sources=inverse(grouped))


@dataclass(frozen=True, kw_only=True)
class AllToAllRound:
    """One round of `AllToAll`.

    sizes: the number of rows for each expert of this device. grouped: the place of each received row [n · C] in the order of the experts.
    sources: the inverse of `grouped`.
    """

    rows: AllToAll
    number: _Number
    sizes: jax.Array
    grouped: jax.Array
    sources: jax.Array

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """Values of tokens [T, ...], or of choices [T, k], as rows in the order of the experts."""
        all_rows, slot = self.rows, self.number * self.rows.capacity + jnp.arange(self.rows.capacity)[None, :]
        choice = all_rows.order[jnp.minimum(all_rows.begin[:, None] + slot, all_rows.order.size - 1)]
        is_there = slot < all_rows.pair[:, None]
        rows = x.reshape(-1)[choice] if by_choice else x[choice // all_rows.num_choices]
        # Nothing reads the results of rows that are not there, but their cotangents and scales would be added up.
        rows = jnp.where(is_there.reshape(*is_there.shape, *[1] * (rows.ndim - 2)), rows, 0)
        received = self._exchanged(rows)
        return received.reshape(-1, *received.shape[2:])[self.sources]

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """Rows in the order of the experts as [T, k, ...]; 0 for choices that are not of this round."""
        all_rows, capacity = self.rows, self.rows.capacity
        back = self._exchanged(rows[self.grouped].reshape(-1, capacity, *rows.shape[1:])).reshape(-1, *rows.shape[1:])
        slot = all_rows.place - all_rows.begin[all_rows.devices] - self.number * capacity
        is_here = (slot >= 0) & (slot < capacity)
        values = back[jnp.where(is_here, all_rows.devices * capacity + slot, 0)]
        values = jnp.where(is_here.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
        return values.reshape(-1, all_rows.num_choices, *rows.shape[1:])

    def _exchanged(self, rows: jax.Array) -> jax.Array:
        """[n, C, ...] for each device → [n, C, ...] from each."""
        return cast(jax.Array, jax.lax.all_to_all(rows, self.rows.axis, 0, 0, tiled=True))


MORE_ROUNDS = "jgt.more_rounds"
"""The named scope of the rounds after the first. A dot and their largest possible number follow."""


Dispatch = AllToAll | LocalRows


def run_forward(call: ExpertCall, dispatch: Dispatch, leaves: Sequence[jax.Array], x: jax.Array, scale: jax.Array) -> jax.Array:
    """The results [T, d'] of tokens [T, d] with scales [T, k]."""
    types: list[DTypeLike] = []

    def round_(number: _Number) -> list[jax.Array]:
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

    def round_(number: _Number) -> list[jax.Array]:
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
    by_rows, *by_weights = pull((cotangent * scales[:, None].astype(cotangent.dtype)).astype(results.dtype))
    return by_scales, (by_rows, *map(with_zeros, by_weights, leaves))


def with_zeros(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of an array; zeros for integers, such as packed weights, which have none."""
    return jnp.zeros_like(x) if gradient.dtype == jax.dtypes.float0 else gradient


def _sum_of_rounds(dispatch: Dispatch, round_: Callable[[_Number], list[jax.Array]]) -> list[jax.Array]:
    # The first round is outside of the loop: with a balanced router it is the only one, and there XLA overlaps its sends with other work.
    first = round_(0)
    if dispatch.max_rounds == 1:
        return first
    rounds = dispatch.rounds

    def more(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        number, sums = state
        return number + 1, [total + new for total, new in zip(sums, round_(number), strict=True)]

    with jax.named_scope(f"{MORE_ROUNDS}.{dispatch.max_rounds - 1}"):
        return jax.lax.while_loop(lambda state: state[0] < rounds, more, (jnp.int32(1), first))[1]
