"""Rows that travel to the devices of their experts, and back: the programs of a device.

n devices of a mesh axis have n parts of the tokens and n parts of the experts, E / n each. A device has T tokens, of which each goes
through k experts, so it sends T · k rows. How many of them go to one device is known only when the program runs, but arrays have fixed
sizes. So each pair of devices has *room* for

    C = room · T · k / n    rows

and an exchange is an all-to-all of an array [n, C, d]. If some pair has more rows than that, all devices run another round for the rows
that are left, and another one, until the fullest pair is served. The rounds of a group of devices follow from a maximum over the axis, so
they all run the same number. With a balanced router it is one. No row is dropped, and the memory is that of one round, whatever is routed.

A round, with 2 devices, 4 experts and C = 3, on device 0:

    rows by expert      a0 b0 c1 | d2 e3 f3 g3      the first three for experts of device 0
    sent, round 0       a0 b0 c1   d2 e3 f3         g3 waits for round 1
    received            a0 b0 c1   m0 n1 --         the second three from device 1; it had only two rows
    by expert           a0 b0 m0 | c1 n1 | --       what the model's function runs on
    sent back           in the order of `received`

Which rows a device gets from whom follows from one small all-to-all of counts. The backward pass is the same exchange for the tokens and
their cotangents; it computes the experts' results again, so that nothing but the arguments is kept.

`over: drop` runs the first round alone. `ragged` sends only the rows there are, by ragged_all_to_all, into the same array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import jax
import jax.numpy as jnp

from jgt.experts.call import ExpertCall
from jgt.experts.rows import counted, inverse

Method = Literal["all-to-all", "gather", "ragged"]
_ALIGNED = 8
"""The room of a pair is a multiple of this, so that matmuls have whole tiles."""


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


def room_of(num_tokens: int, num_choices: int, num_devices: int, room: float) -> int:
    """The rows that each pair of devices has room for."""
    return min(_aligned(room * num_tokens * num_choices / num_devices), _aligned(num_tokens * num_choices))


def _aligned(num_rows: float) -> int:
    return math.ceil(num_rows / _ALIGNED) * _ALIGNED


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Rows sent from each device to each. See the module.

    order: the choices by expert [T · k]. place: of each choice in it. devices: of the choices' experts. begin: the place of the first
    choice for each device. pair: how many there are. received: how many choices of each device [n] are for each expert [E / n] of this one.
    """

    axis: str
    capacity: int
    method: Method
    drops: bool
    num_choices: int
    order: jax.Array
    place: jax.Array
    devices: jax.Array
    begin: jax.Array
    pair: jax.Array
    received: jax.Array

    @classmethod
    def of(cls, choice: jax.Array, num_local: int, axis: str, room: float, method: Method, *, drops: bool) -> Pairs:
        """For choices [T, k] and this many experts on each device."""
        n, (num_tokens, num_choices) = jax.lax.axis_size(axis), choice.shape
        flat = choice.reshape(-1).astype(jnp.int32)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        sizes = counted(flat, n * num_local).reshape(n, num_local)
        pair = jnp.sum(sizes, axis=1)
        return cls(
            axis=axis,
            capacity=room_of(num_tokens, num_choices, n, room),
            method=method,
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
        """See `Traffic`."""
        most = jax.lax.pmax(jnp.max(self.pair), self.axis)
        return -(-most // self.capacity)

    @property
    def max_rounds(self) -> int:
        """See `Traffic`."""
        return 1 if self.drops else -(-self.order.size // self.capacity)

    def start(self, number: Any) -> PairsRound:
        """See `Traffic`."""
        capacity, (n, num_local) = self.capacity, self.received.shape
        # The window of each source's rows that this round has, in their order by expert.
        ends = jnp.clip(jnp.cumsum(self.received, axis=1) - number * capacity, 0, capacity)
        starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        counts = ends - starts
        # The groups of rows on this device: by expert, then by source.
        before = (jnp.cumsum(counts.T.reshape(-1)) - counts.T.reshape(-1)).reshape(num_local, n).T
        slot = jnp.arange(capacity)
        expert = jnp.sum(slot[None, :, None] >= ends[:, None, :], axis=-1)
        in_group = slot + jnp.take_along_axis(before - starts, jnp.minimum(expert, num_local - 1), axis=1)
        filled = ends[:, -1]
        empty = jnp.sum(filled) + jnp.cumsum(capacity - filled)[:, None] - (capacity - slot)
        grouped = jnp.where(expert < num_local, in_group, empty).reshape(-1)
        return PairsRound(
            pairs=self, number=number, sizes=jnp.sum(counts, axis=0), filled=filled, grouped=grouped, sources=inverse(grouped)
        )

    def finish(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Traffic`."""
        return list(sums)


@dataclass(frozen=True, kw_only=True)
class PairsRound:
    """One round of `Pairs`.

    filled: the rows from each device. grouped: the place of each received row [n · C] in the order of the experts. sources: the reverse.
    """

    pairs: Pairs
    number: Any
    sizes: jax.Array
    filled: jax.Array
    grouped: jax.Array
    sources: jax.Array

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """See `Round`."""
        pairs, slot = self.pairs, self.number * self.pairs.capacity + jnp.arange(self.pairs.capacity)
        choice = pairs.order[jnp.minimum(pairs.begin[:, None] + slot, pairs.order.size - 1)]
        is_there = slot < pairs.pair[:, None]
        rows = x.reshape(-1)[choice] if by_choice else x[choice // pairs.num_choices]
        # Nothing reads the results of rows that are not there, but their cotangents and scales would be added up.
        rows = jnp.where(is_there.reshape(*is_there.shape, *[1] * (rows.ndim - 2)), rows, 0)
        sent = jnp.clip(pairs.pair - self.number * pairs.capacity, 0, pairs.capacity)
        received = self._exchanged(rows, sent, self.filled)
        return received.reshape(-1, *received.shape[2:])[self.sources]

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """See `Round`."""
        pairs = self.pairs
        sent = jnp.clip(pairs.pair - self.number * pairs.capacity, 0, pairs.capacity)
        there = rows[self.grouped].reshape(-1, pairs.capacity, *rows.shape[1:])
        back = self._exchanged(there, self.filled, sent).reshape(-1, *rows.shape[1:])
        slot = pairs.place - pairs.begin[pairs.devices] - self.number * pairs.capacity
        is_here = (slot >= 0) & (slot < pairs.capacity)
        found = back[jnp.where(is_here, pairs.devices * pairs.capacity + slot, 0)]
        found = jnp.where(is_here.reshape(-1, *[1] * (found.ndim - 1)), found, 0)
        return found.reshape(-1, pairs.num_choices, *rows.shape[1:])

    def _exchanged(self, rows: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        """[n, C, ...] for each device → [n, C, ...] from each. sent, received: how many rows of each are there."""
        pairs = self.pairs
        if pairs.method == "all-to-all":
            return cast(jax.Array, jax.lax.all_to_all(rows, pairs.axis, 0, 0, tiled=True))
        n, capacity = rows.shape[:2]
        flat = rows.reshape(n * capacity, -1)
        begin = jnp.arange(n, dtype=jnp.int32) * capacity
        mine = jnp.full((n,), jax.lax.axis_index(pairs.axis) * capacity, jnp.int32)
        operands = (begin, sent.astype(jnp.int32), mine, received.astype(jnp.int32))
        moved = jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), *operands, axis_name=pairs.axis)
        return moved.reshape(rows.shape)


@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """The tokens of all devices on each of them, which runs its own experts on what is theirs; the results are added up by scattering.

    order: the choices of all tokens by expert, those of other devices last. place: of each choice in it. sizes: of this device's experts.
    """

    axis: str | None
    capacity: int
    drops: bool
    num_choices: int
    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, choice: jax.Array, num_local: int, axis: str | None, room: float, *, drops: bool) -> Everywhere:
        """For choices [T, k] and this many experts on each device. axis: None if each device has all experts."""
        num_tokens, num_choices = choice.shape
        flat = _whole(choice, axis).reshape(-1).astype(jnp.int32)
        first = 0 if axis is None else jax.lax.axis_index(axis) * num_local
        local = jnp.where((flat >= first) & (flat < first + num_local), flat - first, num_local)
        order = jnp.argsort(local, stable=True).astype(jnp.int32)
        capacity = flat.size if axis is None else min(_aligned(room * num_tokens * num_choices), flat.size)
        sizes = counted(local, num_local)
        return cls(axis=axis, capacity=capacity, drops=drops, num_choices=num_choices, order=order, place=inverse(order), sizes=sizes)

    @property
    def rounds(self) -> jax.Array:
        """See `Traffic`. No round sends anything, so devices need not agree."""
        return -(-jnp.sum(self.sizes) // self.capacity)

    @property
    def max_rounds(self) -> int:
        """See `Traffic`."""
        return 1 if self.drops else -(-self.order.size // self.capacity)

    def start(self, number: Any) -> EverywhereRound:
        """See `Traffic`."""
        ends = jnp.clip(jnp.cumsum(self.sizes) - number * self.capacity, 0, self.capacity)
        sizes = ends - jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        return EverywhereRound(tokens=self, number=number, sizes=sizes)

    def finish(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Traffic`."""
        if self.axis is None:
            return list(sums)
        return [cast(jax.Array, jax.lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)) for x in sums]


@dataclass(frozen=True, kw_only=True)
class EverywhereRound:
    """One round of `Everywhere`."""

    tokens: Everywhere
    number: Any
    sizes: jax.Array

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """See `Round`."""
        g = self.tokens
        slot = self.number * g.capacity + jnp.arange(g.capacity)
        choice = g.order[jnp.minimum(slot, g.order.size - 1)]
        rows = x.reshape(-1)[choice] if by_choice else x[choice // g.num_choices]
        return jnp.where((slot < jnp.sum(g.sizes)).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """See `Round`."""
        g = self.tokens
        slot = g.place - self.number * g.capacity
        is_here = (slot >= 0) & (slot < g.capacity) & (g.place < jnp.sum(g.sizes))
        found = rows[jnp.where(is_here, slot, 0)]
        return jnp.where(is_here.reshape(-1, *[1] * (rows.ndim - 1)), found, 0).reshape(-1, g.num_choices, *rows.shape[1:])


def _whole(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else cast(jax.Array, jax.lax.all_gather(x, axis, axis=0, tiled=True))


# -- both directions ---------------------------------------------------------------------------------------------------


def run_forward(
    call: ExpertCall,
    traffic: Traffic,
    leaves: Sequence[jax.Array],
    x: jax.Array,
    scale: jax.Array,
    brought: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The results [T, d'] of tokens [T, d] with scales [T, k]. brought: makes an array of the tokens what `traffic` takes rows from."""
    x, scale = brought(x), brought(scale)
    types: list[Any] = []

    def round_(number: Any) -> list[jax.Array]:
        one = traffic.start(number)
        back = one.to_tokens(call.run(leaves, one.to_experts(x), one.sizes))
        types.append(back.dtype)
        return [jnp.einsum("tkd,tk->td", back, scale.astype(back.dtype), preferred_element_type=jnp.float32)]

    (y,) = _sum_of_rounds(traffic, round_)
    return traffic.finish([y.astype(types[0])])[0]


def run_backward(
    call: ExpertCall,
    traffic: Traffic,
    leaves: Sequence[jax.Array],
    x: jax.Array,
    scale: jax.Array,
    cotangent: jax.Array,
    brought: Callable[[jax.Array], jax.Array],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """The gradients of the weights, of the tokens and of the scales, from the cotangent [T, d'] of the results."""
    x_type, scale_type = x.dtype, scale.dtype
    x, scale, cotangent = brought(x), brought(scale), brought(cotangent)
    num = len(leaves)

    def round_(number: Any) -> list[jax.Array]:
        one = traffic.start(number)
        rows, scales, behind = one.to_experts(x), one.to_experts(scale, by_choice=True), one.to_experts(cotangent)
        results, pull = jax.vjp(lambda rows, *w: call.run(w, rows, one.sizes), rows, *leaves)
        by_scale = jnp.sum(results.astype(jnp.float32) * behind.astype(jnp.float32), axis=-1)
        by_rows, *by_weights = pull((behind * scales[:, None].astype(behind.dtype)).astype(results.dtype))
        by_tokens = jnp.sum(one.to_tokens(by_rows), axis=1, dtype=jnp.float32)
        return [*by_weights, by_tokens, one.to_tokens(by_scale)]

    sums = _sum_of_rounds(traffic, round_)
    by_x, by_scale = traffic.finish([sums[num].astype(x_type), sums[num + 1].astype(scale_type)])
    return sums[:num], by_x, by_scale


def _sum_of_rounds(traffic: Traffic, round_: Callable[[Any], list[jax.Array]]) -> list[jax.Array]:
    # The first round is no loop: with a balanced router it is the only one, and XLA runs its sends beside other work.
    first = round_(0)
    if traffic.max_rounds == 1:
        return first
    rounds = traffic.rounds

    def more(state: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        number, sums = state
        return number + 1, [total + new for total, new in zip(sums, round_(number), strict=True)]

    with jax.named_scope(MORE_ROUNDS):
        return jax.lax.while_loop(lambda state: state[0] < rounds, more, (jnp.int32(1), first))[1]


MORE_ROUNDS = "jgt.more_rounds"
"""The named scope of the rounds after the first."""
