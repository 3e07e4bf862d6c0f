"""The program of a device in attention on a split sequence: blocks in steps, as keys and values arrive.

A device works on *parts* of the sequence: on the one that it has, or on two in zigzag order (`split`). There each step after the first has
two whole blocks of the four, without a branch. Which two follows from whether the keys come from a device before or behind.

Keys and values *arrive*: around a ring, a part in each step, or all at once, and the steps take them from there. Backward, their gradients
follow them in f32: around the ring with the keys and home at the end, or all at once in a reduce-scatter.

b batch, c positions of a part, n query heads, k key/value heads, h head size, p parts of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from jgt.replacements.context.blocks import NOTHING, Block, BlockGradients, BlockKernel, KeptRows
from jgt.replacements.context.proof import Attention

_Number = jax.Array | int
_Keys = tuple[jax.Array, list[jax.Array]]
"""The keys and values of a device as one array, and what else travels with them."""
_Tree = TypeVar("_Tree")
_State = TypeVar("_State")


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A block: the numbers of a part of queries and of a part of keys, which may be traced.

    is_same: whether both are one part. is_past: whether no key comes after a query; False leaves the block out.
    """

    queries: _Number
    keys: _Number
    is_same: bool = False
    is_past: jax.Array | bool = True


@dataclass(frozen=True, kw_only=True)
class RowsDevice:
    """A device of an axis, whose arrays are divided into parts: [p, b, c, ...]. part: the positions of a part."""

    attention: Attention
    kernel: BlockKernel
    axis: str
    is_zigzag: bool
    is_ring: bool
    part: int

    @property
    def num(self) -> int:
        """The number of devices."""
        return jax.lax.axis_size(self.axis)

    @property
    def steps(self) -> int:
        """The number of steps after the first. Beyond a window no query sees a key."""
        return steps_of(self.attention, self.num, self.part, is_zigzag=self.is_zigzag)

    def parted(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """[..., p · c, ...] → [p, ..., c, ...]"""
        return jnp.stack(jnp.split(x, 2 if self.is_zigzag else 1, dim))

    def joined(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """The inverse of `parted`."""
        return jax.lax.concatenate(list(x), dim)

    # -- which blocks ----------------------------------------------------------------------------------------------

    def _first(self) -> list[_Pair]:
        """The blocks of the device's own keys."""
        own = [_Pair(queries=part, keys=part, is_same=True) for part in range(2 if self.is_zigzag else 1)]
        return [*own, *([_Pair(queries=1, keys=0)] if self.is_zigzag else [])]

    def _later(self, step: _Number) -> list[_Pair]:
        """The blocks of the keys of the device that is `step` places back."""
        is_before = step <= jax.lax.axis_index(self.axis)
        if not self.is_zigzag:
            return [_Pair(queries=0, keys=0, is_past=is_before if self.attention.is_causal else True)]
        # All queries of the high part come after the low parts of all devices. Of the two other blocks, one is in the past.
        other = jnp.where(is_before, 0, 1)
        return [_Pair(queries=1, keys=0), _Pair(queries=other, keys=other)]

    def _seen(self, pair: _Pair, step: _Number, staying: Sequence[jax.Array], travelling: Sequence[jax.Array]) -> jax.Array | None:
        """Which keys of a block its queries see, where the kernel does not know it."""
        if self.attention.is_plain:
            return None
        here = jax.lax.axis_index(self.axis)
        mine, others = iter(staying), iter(travelling)
        values: list[jax.Array] = []
        for one in self.attention.pairs.operands:
            x = next(others) if one.is_of_keys else next(mine)
            values.append(x if one.rows is None else _at(x, pair.keys if one.is_of_keys else pair.queries))
        queries, keys = self._positions(here, pair.queries), self._positions((here - step) % self.num, pair.keys)
        return self.attention.pairs.seen(queries, keys, values)

    def _positions(self, device: _Number, part: _Number) -> jax.Array:
        """The positions int32[c] of a device's part in the sequence."""
        number = jnp.where(part == 0, device, 2 * self.num - 1 - device) if self.is_zigzag else device
        return number * self.part + jnp.arange(self.part, dtype=jnp.int32)

    # -- how keys arrive -------------------------------------------------------------------------------------------

    def _moved(self, tree: _Tree, places: int = 1) -> _Tree:
        """The arrays of the device so many places back."""
        way = [(i, (i + places) % self.num) for i in range(self.num)]
        return _each(tree, lambda x: jax.lax.ppermute(x, self.axis, way))

    def _arrivals(self, own: _Tree) -> _Tree:
        """The arrays of all devices [n, ...], in the order of the steps."""
        order = (jax.lax.axis_index(self.axis) - jnp.arange(self.steps + 1)) % self.num
        return _each(own, lambda x: cast(jax.Array, jax.lax.all_gather(x, self.axis))[order])

    def _walked(self, state: _State, own: _Tree, run: Callable[[_State, _Number, _Tree, list[_Pair]], _State]) -> _State:
        """The state after all steps: state = run(state, step, arrays of the keys, blocks), beginning with the device's own arrays."""
        if not self.is_ring:
            arrivals: Any = self._arrivals(own) if self.steps else None
            state = run(state, 0, own, self._first())

            def step(state: _State, arrived: tuple[jax.Array, _Tree]) -> tuple[_State, None]:
                return run(state, arrived[0], arrived[1], self._later(arrived[0])), None

            later = _each(arrivals, lambda x: x[1:])
            return jax.lax.scan(step, state, (jnp.arange(1, self.steps + 1), later))[0] if self.steps else state
        state, keys = run(state, 0, own, self._first()), self._moved(own) if self.steps else own

        def pass_on(carry: tuple[_State, _Tree], step: jax.Array) -> tuple[tuple[_State, _Tree], None]:
            state, keys = carry
            # The next keys travel while these are multiplied.
            following = self._moved(keys)
            return (run(state, step, keys, self._later(step)), following), None

        if self.steps > 1:
            (state, keys), _ = jax.lax.scan(pass_on, (state, keys), jnp.arange(1, self.steps))
        return run(state, self.steps, keys, self._later(self.steps)) if self.steps else state

    # -- forward and backward --------------------------------------------------------------------------------------

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, staying: Sequence[jax.Array], travelling: Sequence[jax.Array]) -> Block:
        """The attention of a device's queries to all keys, [p, ...]."""
        like = k

        def run(state: Block, step: _Number, keys: _Keys, pairs: list[_Pair]) -> Block:
            (k, v), travelling = _apart(keys[0], like), keys[1]
            for pair in pairs:
                seen = self._seen(pair, step, staying, travelling)
                is_causal = self.attention.is_causal and pair.is_same and seen is None
                block = self.kernel.forward(
                    _at(q, pair.queries), _at(k, pair.keys), _at(v, pair.keys), seen, is_causal, self.attention.scale
                )
                block = block if pair.is_past is True else block._replace(lse=jnp.where(pair.is_past, block.lse, NOTHING))
                before = Block(*(_at(x, pair.queries) for x in state))
                state = Block(*(_with(x, pair.queries, new) for x, new in zip(state, before.merged(block), strict=True)))
            return state

        empty = Block(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), jnp.full((*q.shape[:2], q.shape[3], q.shape[2]), NOTHING))
        return self._walked(empty, (_together(k, v), list(travelling)), run)

    def backward(self, rows: KeptRows, staying: Sequence[jax.Array], travelling: Sequence[jax.Array]) -> BlockGradients:
        """The gradients of a device's q, k and v, [p, ...], from rows [p, ...]."""
        q, k, v, *_ = rows
        like = k

        def gradients(step: _Number, keys: _Keys, pairs: list[_Pair]) -> BlockGradients:
            (k, v), travelling = _apart(keys[0], like), keys[1]
            total = BlockGradients(*(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
            for pair in pairs:
                seen = self._seen(pair, step, staying, travelling)
                is_causal = self.attention.is_causal and pair.is_same and seen is None
                own = [_at(x, pair.queries) for x in rows]
                own[1:3] = _at(k, pair.keys), _at(v, pair.keys)
                one = self.kernel.backward(KeptRows(*own), seen, is_causal, self.attention.scale)
                one = one if pair.is_past is True else BlockGradients(*(jnp.where(pair.is_past, x, 0) for x in one))
                numbers = (pair.queries, pair.keys, pair.keys)
                total = BlockGradients(*(_with(x, n, _at(x, n) + new) for x, n, new in zip(total, numbers, one, strict=True)))
            return total

        own = (_together(k, v), list(travelling))
        if self.is_ring:

            def run(state: Any, step: _Number, keys: _Keys, pairs: list[_Pair]) -> Any:
                by_q, by_keys = state
                # The gradients of keys travel while these are multiplied.
                moved = None if by_keys is None else self._moved(by_keys)
                new = gradients(step, keys, pairs)
                added = _together(*new[1:])
                return by_q + new.q, added if moved is None else moved + added

            nothing: Any = (jnp.zeros(q.shape, jnp.float32), None)
            by_q, by_keys = self._walked(nothing, own, run)
            return BlockGradients(by_q, *_apart(self._moved(by_keys, -self.steps) if self.steps else by_keys, like))
        return self._gathered(q, own, gradients)

    def _gathered(self, q: jax.Array, own: _Keys, gradients: Callable[..., BlockGradients]) -> BlockGradients:
        first = gradients(0, own, self._first())
        if not self.steps:
            return first

        def step(by_q: jax.Array, arrived: tuple[jax.Array, _Keys]) -> tuple[jax.Array, jax.Array]:
            new = gradients(arrived[0], arrived[1], self._later(arrived[0]))
            return by_q + new.q, _together(*new[1:]).astype(own[0].dtype)

        later = _each(self._arrivals(own), lambda x: x[1:])
        by_q, by_keys = jax.lax.scan(step, first.q, (jnp.arange(1, self.steps + 1), later))
        back = (jax.lax.axis_index(self.axis) - jnp.arange(self.num)) % self.num
        every = jnp.concatenate([_together(*first[1:])[None].astype(by_keys.dtype), by_keys])
        every = jnp.pad(every, [(0, self.num - 1 - self.steps), *[(0, 0)] * (every.ndim - 1)])
        return BlockGradients(by_q, *_apart(cast(jax.Array, jax.lax.psum_scatter(every[back], self.axis)), first.k))


def steps_of(attention: Attention, num: int, part: int, *, is_zigzag: bool) -> int:
    """The number of steps after the first, with so many devices and positions of a part."""
    if attention.window is None or not attention.is_causal or is_zigzag:
        return num - 1
    return min(num - 1, -(-(attention.window - 1) // part))


def _together(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values as one array, which travels at once: a stack, or side by side where their widths differ."""
    return jnp.stack([k, v]) if k.shape == v.shape else jnp.concatenate([k, v], -1)


def _apart(both: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `_together`. k: an array of the shape of the keys."""
    one, other = both if both.ndim > k.ndim else jnp.split(both, [k.shape[-1]], -1)
    return one, other


def _each(tree: _Tree, fn: Callable[[jax.Array], jax.Array]) -> _Tree:
    return jax.tree.map(fn, tree)


def _at(x: jax.Array, number: _Number) -> jax.Array:
    return x[number] if isinstance(number, int) else cast(jax.Array, jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False))


def _with(x: jax.Array, number: _Number, new: jax.Array) -> jax.Array:
    return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(x, new, number, 0))
