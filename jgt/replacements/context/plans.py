"""Attention on a sequence that an axis of the mesh splits: the device plans, forward and backward, and how rows reach them.

There are three ways, by what travels. With n devices, and Q and K the bytes of a device's q and of its k (= v):

    gather      each device fetches all keys and values              forward 2(n-1)K, backward twice that
    ring        they pass around, a part in each step                forward 2(n-1)K, backward 2(n-1)K and 2n · 2K (gradients in f32)
    ulysses     rows of all heads for all rows of some heads         (n-1)/n · (2Q + 2K), and once more backward

The first two may run in zigzag order (`device`). The rows of the batch are not in that order, so they are exchanged before and after, for
2Q + 2K in each direction.

b batch, s seq, n query heads, k key/value heads, h head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.replacements.context.blocks import XLA_BLOCKS, BlockKernel
from jgt.replacements.context.device import KeptRows, RowsDevice, exchanged, steps_of, zigzag
from jgt.replacements.context.proof import Attention
from jgt.replacements.device_plan import DevicePlan, SentBytes, run_on_devices
from jgt.rules.rules import Method


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How a sequence is split, and how attention to it is computed.

    num: the number of devices of the axis. batch, heads: the mesh axes of these dims. is_zigzag: whether devices compute in zigzag order.
    """

    attention: Attention
    method: Method
    axis: str
    num: int
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    is_zigzag: bool
    kernel: BlockKernel

    @property
    def rows(self) -> Dims:
        """The axes of q, k and v."""
        return (self.batch, (self.axis,), self.heads, ())

    @property
    def kept(self) -> Dims:
        """The axes of what the backward pass reads."""
        return (self.batch, (), (*self.heads, self.axis), ()) if self.method == "ulysses" else self.rows

    @property
    def lse(self) -> Dims:
        """The axes of the log-sum-exp [b, n, s]."""
        batch, rows, heads, _ = self.kept
        return (batch, heads, rows)

    @property
    def has_own_order(self) -> bool:
        """Whether the backward pass reads q, k, v and out as they are not outside."""
        return self.is_zigzag or self.method == "ulysses"

    def operands(self) -> list[Dims]:
        """The axes of what the pairs of queries and keys need."""
        of = {"batch": self.batch}
        found: list[Dims] = []
        for one in self.attention.pairs.operands:
            found.append(tuple((self.axis,) if dim == one.rows else of.get(label or "", ()) for dim, label in enumerate(one.labels)))
        return found

    def axes(self) -> frozenset[str]:
        """All mesh axes."""
        return frozenset((*self.batch, self.axis, *self.heads))


def ordered(x: jax.Array, split: SequenceSplit, dim: int, *, is_back: bool = False) -> jax.Array:
    """A whole sequence in the order in which the devices keep it, or with `is_back` in its own again."""
    return zigzag(x, split.num, dim, is_back=is_back) if split.is_zigzag else x


@dataclass(frozen=True, kw_only=True)
class _Direction(DevicePlan):
    """The common part of both directions."""

    split: SequenceSplit

    def axes(self) -> frozenset[str]:
        return self.split.axes()

    def _device(self, length: int) -> RowsDevice:
        split = self.split
        return RowsDevice(
            attention=split.attention,
            kernel=split.kernel,
            axis=split.axis,
            is_zigzag=split.is_zigzag,
            is_ring=split.method == "ring",
            part=length // (2 if split.is_zigzag else 1),
        )

    def _others(self, device: RowsDevice, others: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The operands of the pairs, in parts: those that stay with the queries, and those that travel with the keys."""
        staying: list[jax.Array] = []
        travelling: list[jax.Array] = []
        for x, one in zip(others, self.split.attention.pairs.operands, strict=True):
            rows = x if one.rows is None or not self.split.is_zigzag else exchanged(x, self.split.axis, one.rows)
            (travelling if one.is_of_keys else staying).append(rows if one.rows is None else device.parted(rows, one.rows))
        return staying, travelling

    def _whole(self, others: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands of the pairs for the whole sequence."""
        operands, axis = self.split.attention.pairs.operands, self.split.axis
        return [
            x if one.rows is None else jax.lax.all_gather(x, axis, axis=one.rows, tiled=True)
            for x, one in zip(others, operands, strict=True)
        ]

    def _seen(self, length: int, others: Sequence[jax.Array]) -> jax.Array | None:
        positions = jnp.arange(length, dtype=jnp.int32)
        return self.split.attention.seen(positions, positions, others)

    def _of_heads(self, x: jax.Array, *, is_back: bool = False) -> jax.Array:
        """All rows of some heads for some rows of all heads, or with `is_back` the other way round."""
        return jax.lax.all_to_all(x, self.split.axis, 1 if is_back else 2, 2 if is_back else 1, tiled=True)

    def _sent(self, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int], length: int, of: _Sizes) -> SentBytes:
        split, n = self.split, sizes[self.split.axis]
        if n == 1:
            return None
        parts = math.prod(sizes[axis] for axis in split.axes())
        if split.method == "ulysses":
            return (split.axis,), Fraction(sum(map(bytes_of, of.exchanged)), parts) * Fraction(n - 1, n)
        part = length // (n * (2 if split.is_zigzag else 1))
        steps = steps_of(split.attention, n, part, is_zigzag=split.is_zigzag) if split.method == "ring" else n - 1
        total = steps * sum(map(bytes_of, of.keys)) + (sum(map(bytes_of, of.exchanged)) if split.is_zigzag else 0)
        if of.is_backward:
            total += (steps + 1) * of.wide * bool(steps) if split.method == "ring" else (n - 1) * sum(map(bytes_of, of.keys))
        return (split.axis,), Fraction(total, parts)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """A direction sends these. keys: k and v; exchanged: arrays that change their order or their heads; wide: the bytes of the gradients of
    keys and values in f32."""

    keys: Sequence[jx.Atom]
    exchanged: Sequence[jx.Atom]
    wide: int = 0
    is_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class ContextForward(_Direction):
    """q, k, v and what the pairs need → out, and, if `keeps`, what the backward pass reads: log-sum-exp [b, n, s], q, k, v, out.

    q, k, v and out are there only where they are not those of outside: in zigzag order, or as all rows of some heads.
    """

    keeps: bool

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        (q, k, v, *others), split = arrays, self.split
        seen = self._seen(q.shape[1], others)
        block = XLA_BLOCKS.forward(q, k, v, seen, split.attention.is_causal and seen is None, split.attention.scale)
        out = block.out.astype(q.dtype)
        kept = [block.lse, *([q, k, v, out] if split.has_own_order else [])]
        return [out, *([ordered(x, split, 2 if n == 0 else 1) for n, x in enumerate(kept)] if self.keeps else [])]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        split = self.split
        kept = [split.lse, *[split.kept] * (4 if split.has_own_order else 0)] if self.keeps else []
        return [*[split.rows] * 3, *split.operands()], [split.rows, *kept]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        (q, k, v, *others), split = parts, self.split
        if split.method == "ulysses":
            of_heads = [self._of_heads(x) for x in (q, k, v)]
            seen = self._seen(of_heads[0].shape[1], self._whole(others))
            block = split.kernel.forward(*of_heads, seen, split.attention.is_causal and seen is None, split.attention.scale)
            inner = block.out.astype(q.dtype)
            return [self._of_heads(inner, is_back=True), *([block.lse, *of_heads, inner] if self.keeps else [])]
        device = self._device(q.shape[1])
        if split.is_zigzag:
            q, k, v = (exchanged(x, split.axis, 1) for x in (q, k, v))
        staying, travelling = self._others(device, others)
        block = device.forward(device.parted(q), device.parted(k), device.parted(v), staying, travelling)
        inner = device.joined(block.out).astype(q.dtype)
        out = exchanged(inner, split.axis, 1, is_back=True) if split.is_zigzag else inner
        kept = [device.joined(block.lse, 2), *([q, k, v, inner] if split.is_zigzag else [])]
        return [out, *(kept if self.keeps else [])]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        q, k, v = equation.invars[:3]
        of = _Sizes(keys=(k, v), exchanged=(q, k, v, equation.outvars[0]))
        return self._sent(sizes, bytes_of, jx.shape_of(q)[1], of)

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[ContextForward | None, list[int]]:
        if not any(used):
            return None, []
        is_first = used[0] and not any(used[1:])
        return (replace(self, keeps=False) if is_first else self), list(range(num_operands))


@dataclass(frozen=True, kw_only=True)
class ContextBackward(_Direction):
    """q, k, v, out, log-sum-exp as `ContextForward` keeps them, the cotangent of out, and what the pairs need → gradients of q, k and v."""

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        (*kept, lse, cotangent), others = arrays[:6], arrays[6:]
        split = self.split
        q, k, v, out = (ordered(x, split, 1, is_back=True) for x in kept)
        seen = self._seen(q.shape[1], others)
        lse = ordered(lse, split, 2, is_back=True)
        is_causal = split.attention.is_causal and seen is None
        grads = XLA_BLOCKS.backward(q, k, v, out, lse, cotangent, seen, is_causal, split.attention.scale)
        return [g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        split = self.split
        return [*[split.kept] * 4, split.lse, split.rows, *split.operands()], [split.rows] * 3

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        (q, k, v, out, lse, cotangent), others, split = parts[:6], parts[6:], self.split
        if split.method == "ulysses":
            seen = self._seen(q.shape[1], self._whole(others))
            is_causal = split.attention.is_causal and seen is None
            grads = split.kernel.backward(q, k, v, out, lse, self._of_heads(cotangent), seen, is_causal, split.attention.scale)
            return [self._of_heads(g.astype(x.dtype), is_back=True) for g, x in zip(grads, (q, k, v), strict=True)]
        device = self._device(q.shape[1])
        cotangent = exchanged(cotangent, split.axis, 1) if split.is_zigzag else cotangent
        staying, travelling = self._others(device, others)
        q_rows, k_rows, v_rows, out_rows = (device.parted(x) for x in (q, k, v, out))
        rows = KeptRows(q_rows, k_rows, v_rows, out_rows, device.parted(lse, 2), device.parted(cotangent))
        grads = device.backward(rows, staying, travelling)
        joined = [device.joined(g).astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]
        return [exchanged(x, split.axis, 1, is_back=True) for x in joined] if split.is_zigzag else joined

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        q, k, v, _, _, cotangent = equation.invars[:6]
        wide = 4 * sum(math.prod(jx.shape_of(x)) for x in (k, v))
        of = _Sizes(keys=(k, v), exchanged=(q, k, v, cotangent), wide=wide, is_backward=True)
        return self._sent(sizes, bytes_of, jx.shape_of(q)[1], of)


def attend(split: SequenceSplit, mesh: Mesh | AbstractMesh, q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
    """The heads [b, s, n, h] of q [b, s, n, h] and k, v [b, s, k, h], split over the mesh. others: the operands of the pairs."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
        return run_on_devices(ContextForward(split=split, keeps=False), mesh, q, k, v, *others)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> tuple[jax.Array, Any]:
        out, lse, *own = run_on_devices(ContextForward(split=split, keeps=True), mesh, q, k, v, *others)
        return out, ([*(own or (q, k, v, out)), lse], others)

    def backward(residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        kept, others = residuals
        grads = run_on_devices(ContextBackward(split=split), mesh, *kept, cotangent, *others)
        return *grads, *[None] * len(others)

    call = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(run))
    call.defvjp(forward, backward)
    return call(q, k, v, *others)
