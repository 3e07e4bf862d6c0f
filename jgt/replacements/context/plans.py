"""Attention on a sequence that an axis of the mesh splits: the device plans, forward and backward, and how rows reach them.

There are three ways, by what travels. With n devices, and Q and K the bytes of a device's q and of its k (= v):

    gather      each device fetches all keys and values              forward 2(n-1)K, backward twice that
    ring        they pass around, a part in each step                forward 2(n-1)K, backward 2(n-1)K and 2n · 2K (gradients in f32)
    ulysses     rows of all heads for all rows of some heads         (n-1)/n · (2Q + 2K), and once more backward

The first two may run in zigzag order (`device`). Rows of a batch that are not in that order are exchanged before and after, for 2Q + 2K
in each direction.

b batch, s seq, n query heads, k key/value heads, h head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.replacements.context.blocks import XLA_BLOCKS, Block, KeptRows
from jgt.replacements.context.device import RowsDevice, steps_of
from jgt.replacements.context.split import SequenceSplit, exchanged, zigzag
from jgt.replacements.device_plan import DevicePlan, SentBytes, run_on_devices

_Residuals = tuple[list[jax.Array], tuple[jax.Array, ...]]


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
            rows = x if one.rows is None else self._arranged(x, one.rows)
            (travelling if one.is_of_keys else staying).append(rows if one.rows is None else device.parted(rows, one.rows))
        return staying, travelling

    def _arranged(self, x: jax.Array, dim: int = 1, *, is_back: bool = False) -> jax.Array:
        """A device's rows of the batch in the order in which it computes, or with `is_back` the other way round."""
        return exchanged(x, self.split.axis, dim, is_back=is_back) if self.split.is_exchanged else x

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
        total = steps * sum(map(bytes_of, of.keys)) + (sum(map(bytes_of, of.exchanged)) if split.is_exchanged else 0)
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
    """q, k, v, what the pairs need, and a sink [n] if there is one → out, and, if `keeps`, what the backward pass reads: log-sum-exp
    [b, n, s], q, k, v, out.

    q, k, v and out are there only where they are not those of outside: in another order, or as all rows of some heads.
    """

    keeps: bool

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        (q, k, v), others, sink = self._parts(arrays)
        split = self.split
        q, k, v = (zigzag(x, split.outside, 1, is_back=True) for x in (q, k, v))
        seen = self._seen(q.shape[1], split.in_order(others))
        block = XLA_BLOCKS.forward(q, k, v, seen, split.attention.is_causal and seen is None, split.attention.scale)
        block = block if sink is None else block.with_sink(sink)
        out = block.out.astype(q.dtype)
        kept = [block.lse, *([q, k, v, out] if split.has_own_order else [])]
        return [
            zigzag(out, split.outside, 1),
            *([zigzag(x, split.inside, 2 if n == 0 else 1) for n, x in enumerate(kept)] if self.keeps else []),
        ]

    def _parts(self, arrays: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Sequence[jax.Array], jax.Array | None]:
        """q, k and v; what the pairs need; the sink in f32."""
        has_sink = self.split.attention.sink is not None
        return arrays[:3], arrays[3:-1] if has_sink else arrays[3:], arrays[-1].astype(jnp.float32) if has_sink else None

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        split = self.split
        kept = [split.lse, *[split.kept] * (4 if split.has_own_order else 0)] if self.keeps else []
        sink = [] if split.attention.sink is None else [(split.kept[2],)]
        return [*[split.rows] * 3, *split.operands(), *sink], [split.rows, *kept]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        rows, others, sink = self._parts(parts)
        split = self.split
        if split.method == "ulysses":
            rows = [self._of_heads(x) for x in rows]
            seen = self._seen(rows[0].shape[1], self._whole(others))
            block = split.kernel.forward(*rows, seen, split.attention.is_causal and seen is None, split.attention.scale)
        else:
            device = self._device(rows[0].shape[1])
            rows = [self._arranged(x) for x in rows]
            q, k, v = map(device.parted, rows)
            block = device.forward(q, k, v, *self._others(device, others))
            block = Block(device.joined(block.out), device.joined(block.lse, 2))
        block = block if sink is None else block.with_sink(sink)
        inner = block.out.astype(rows[0].dtype)
        out = self._of_heads(inner, is_back=True) if split.method == "ulysses" else self._arranged(inner, is_back=True)
        return [out, *([block.lse, *([*rows, inner] if split.has_own_order else [])] if self.keeps else [])]

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
    """q, k, v, out, log-sum-exp as `ContextForward` keeps them, the cotangent of out, and what the pairs need → gradients of q, k and v.

    With a sink also the products f32[b, n, s] of out and its cotangent, in the order of the log-sum-exp.
    """

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        (*kept, lse, cotangent), split = arrays[:6], self.split
        q, k, v, out = (zigzag(x, split.inside, 1, is_back=True) for x in kept)
        cotangent = zigzag(cotangent, split.outside, 1, is_back=True)
        rows = KeptRows(q, k, v, out, zigzag(lse, split.inside, 2, is_back=True), cotangent)
        seen = self._seen(q.shape[1], split.in_order(arrays[6:]))
        grads = XLA_BLOCKS.backward(rows, seen, split.attention.is_causal and seen is None, split.attention.scale)
        grads = [zigzag(g.astype(x.dtype), split.outside, 1) for g, x in zip(grads, rows, strict=False)]
        return [*grads, *(zigzag(x, split.inside, 2) for x in self._products(rows))]

    def _products(self, rows: KeptRows) -> list[jax.Array]:
        if self.split.attention.sink is None:
            return []
        return [jnp.einsum("bsnh,bsnh->bns", rows.out, rows.cotangent, preferred_element_type=jnp.float32)]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        split = self.split
        products = [] if split.attention.sink is None else [split.lse]
        return [*[split.kept] * 4, split.lse, split.rows, *split.operands()], [*[split.rows] * 3, *products]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        rows, others, split = KeptRows(*parts[:6]), parts[6:], self.split
        if split.method == "ulysses":
            rows = rows._replace(cotangent=self._of_heads(rows.cotangent))
            seen = self._seen(rows.q.shape[1], self._whole(others))
            grads = split.kernel.backward(rows, seen, split.attention.is_causal and seen is None, split.attention.scale)
            back = self._of_heads
        else:
            device = self._device(rows.q.shape[1])
            rows = rows._replace(cotangent=self._arranged(rows.cotangent))
            parted = KeptRows(*(device.parted(x, 2 if name == "lse" else 1) for name, x in rows._asdict().items()))
            grads = map(device.joined, device.backward(parted, *self._others(device, others)))
            back = self._arranged
        own = [back(g.astype(x.dtype), is_back=True) for g, x in zip(grads, rows, strict=False)]
        return [*own, *self._products(rows)]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        q, k, v, _, _, cotangent = equation.invars[:6]
        wide = 4 * sum(math.prod(jx.shape_of(x)) for x in (k, v))
        of = _Sizes(keys=(k, v), exchanged=(q, k, v, cotangent), wide=wide, is_backward=True)
        return self._sent(sizes, bytes_of, jx.shape_of(q)[1], of)


def attend(split: SequenceSplit, mesh: Mesh | AbstractMesh, q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
    """The heads [b, s, n, h] of q [b, s, n, h] and k, v [b, s, k, h], split over the mesh.

    others: the operands of the pairs, and a sink [n] if there is one.
    """
    has_sink = split.attention.sink is not None

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
        return run_on_devices(ContextForward(split=split, keeps=False), mesh, q, k, v, *others)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> tuple[jax.Array, _Residuals]:
        out, lse, *own = run_on_devices(ContextForward(split=split, keeps=True), mesh, q, k, v, *others)
        return out, ([*(own or (q, k, v, out)), lse], others)

    def backward(residuals: _Residuals, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
        kept, others = residuals
        pairs = others[:-1] if has_sink else others
        *grads, by_sink = [*run_on_devices(ContextBackward(split=split), mesh, *kept, cotangent, *pairs), *([] if has_sink else [None])]
        if by_sink is not None:
            # A sink's own weight, times the products of all queries, since its value is zero.
            weights = jnp.exp(others[-1].astype(jnp.float32)[None, :, None] - kept[-1])
            by_sink = -jnp.sum(weights * by_sink, (0, 2)).astype(others[-1].dtype)
        return *grads, *[None] * len(pairs), *([by_sink] if has_sink else [])

    call = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(run))
    call.defvjp(forward, backward)
    return call(q, k, v, *others)
