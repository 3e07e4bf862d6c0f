"""Rows that travel to the devices of their experts, and back: the programs of a device.

A mesh axis of n devices splits the E experts and the tokens: each device holds E / n experts and T tokens. Each token goes through k
experts, so a device sends T · k rows. How many of them go to one device is known only when the program runs, but arrays have fixed
sizes. So each pair of devices has *room* for

    C = room · T · k / n    rows

and an exchange is an all-to-all of an array [n, C, d]. If some pair has more rows than that, all devices run another round for the rows
that are left, and another one, until the fullest pair is served. The devices of the axis agree on the number of rounds by a maximum over
it. With a balanced router it is one. No row is dropped, and memory is needed for one round only, whatever the router chooses.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from jgt.experts.rows import counted, inverse

_ALIGNED = 8
"""The room of a pair is a multiple of this, so that matmuls have whole tiles."""


def room_of(num_tokens: int, num_choices: int, num_devices: int, room: float) -> int:
    """The rows that each pair of devices has room for."""
    return min(aligned(room * num_tokens * num_choices / num_devices), aligned(num_tokens * num_choices))


def aligned(num_rows: float) -> int:
    """A number of rows, rounded up to whole tiles."""
    return math.ceil(num_rows / _ALIGNED) * _ALIGNED


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """Rows sent from each device to each. See the module.

    order: the choices by expert [T · k]. place: of each choice in it. devices: of the choices' experts. begin: the place of the first
    choice for each device. pair: how many there are. received: how many choices of each device [n] are for each expert [E / n] of this one.
    """

    axis: str
    capacity: int
    method: Literal["all-to-all", "ragged"]
    drops: bool
    num_choices: int
    order: jax.Array
    place: jax.Array
    devices: jax.Array
    begin: jax.Array
    pair: jax.Array
    received: jax.Array

    @classmethod
    def of(
        cls, choice: jax.Array, num_local: int, axis: str, room: float, method: Literal["all-to-all", "ragged"], *, drops: bool
    ) -> Rooms:
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

    def start(self, number: Any) -> RoomsRound:
        """See `Traffic`."""
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
        return RoomsRound(
            rooms=self, number=number, sizes=jnp.sum(counts, axis=0), filled=filled, grouped=grouped, sources=inverse(grouped)
        )

    def brought(self, x: jax.Array) -> jax.Array:
        """See `Traffic`."""
        return x

    def finish(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Traffic`."""
        return list(sums)


@dataclass(frozen=True, kw_only=True)
class RoomsRound:
    """One round of `Rooms`.

    filled: the rows from each device. grouped: the place of each received row [n · C] in the order of the experts. sources: the reverse.
    """

    rooms: Rooms
    number: Any
    sizes: jax.Array
    filled: jax.Array
    grouped: jax.Array
    sources: jax.Array

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """See `Round`."""
        rooms, slot = self.rooms, self.number * self.rooms.capacity + jnp.arange(self.rooms.capacity)[None, :]
        choice = rooms.order[jnp.minimum(rooms.begin[:, None] + slot, rooms.order.size - 1)]
        is_there = slot < rooms.pair[:, None]
        rows = x.reshape(-1)[choice] if by_choice else x[choice // rooms.num_choices]
        # Nothing reads the results of rows that are not there, but their cotangents and scales would be added up.
        rows = jnp.where(is_there.reshape(*is_there.shape, *[1] * (rows.ndim - 2)), rows, 0)
        sent = jnp.clip(rooms.pair - self.number * rooms.capacity, 0, rooms.capacity)
        received = self._exchanged(rows, sent, self.filled)
        return received.reshape(-1, *received.shape[2:])[self.sources]

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """See `Round`."""
        rooms = self.rooms
        sent = jnp.clip(rooms.pair - self.number * rooms.capacity, 0, rooms.capacity)
        there = rows[self.grouped].reshape(-1, rooms.capacity, *rows.shape[1:])
        back = self._exchanged(there, self.filled, sent).reshape(-1, *rows.shape[1:])
        slot = rooms.place - rooms.begin[rooms.devices] - self.number * rooms.capacity
        is_here = (slot >= 0) & (slot < rooms.capacity)
        found = back[jnp.where(is_here, rooms.devices * rooms.capacity + slot, 0)]
        found = jnp.where(is_here.reshape(-1, *[1] * (found.ndim - 1)), found, 0)
        return found.reshape(-1, rooms.num_choices, *rows.shape[1:])

    def _exchanged(self, rows: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        """[n, C, ...] for each device → [n, C, ...] from each. sent, received: how many rows of each are there."""
        rooms = self.rooms
        if rooms.method == "all-to-all":
            return cast(jax.Array, jax.lax.all_to_all(rows, rooms.axis, 0, 0, tiled=True))
        n, capacity = rows.shape[:2]
        flat = rows.reshape(n * capacity, -1)
        begin = jnp.arange(n, dtype=jnp.int32) * capacity
        mine = jnp.full((n,), jax.lax.axis_index(rooms.axis) * capacity, jnp.int32)
        operands = (begin, sent.astype(jnp.int32), mine, received.astype(jnp.int32))
        moved = cast(Any, jax.lax.ragged_all_to_all)(flat, jnp.zeros_like(flat), *operands, axis_name=rooms.axis)
        return moved.reshape(rows.shape)
