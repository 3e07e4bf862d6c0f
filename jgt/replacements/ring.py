"""Matmuls beside the sends that they need: the devices of a tensor-parallel axis pass parts of the rows around a ring.

With sequence parallelism (arXiv 2205.05198) a device has a part of the sequence between the blocks, and all of the sequence, of a part of
the features, inside them. So a block begins with an all-gather of the rows and a matmul, and ends with a matmul and a reduce-scatter.
XLA runs the collective, then the matmul, and one waits for the other. But a product of some rows needs only these rows. So here the n
devices of the axis take n steps (arXiv 2302.05045 does the same in XLA):

    gather       step j multiplies the part of device i - j while that part travels on to device i + 1
    scatter      step j multiplies the rows of device i - j - 1 while the sum of them so far travels to device i + 1

After n steps every device has multiplied all rows, or has the whole sum of its rows. A step takes the longer of a matmul and a send, and
nothing waits for what the first step sends. XLA's scheduler would start all sends first; a barrier in each step ties it to its matmul.

Several matmuls that read the same rows (q, k and v; gate and up) share one ring. The backward pass is made of the same two
programs: the cotangent of rows that were gathered is scattered, and the other way round. The gradient of the weights needs the whole rows
once more. It is an ordinary matmul, which XLA partitions as any other; the rows for it are a by-product of a ring.

d is the dim of the sequence, k and m are sizes of features, and n is the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.replacements.device_plan import DevicePlan, SentBytes, run_on_devices

_Residuals = tuple[jax.Array, tuple[jax.Array, ...]]
"""The rows of a matmul, and the weights of each."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices of an axis, and the arrays that they share.

    dim: the dim of the rows that the axis splits between the blocks. rows: the other axes of each dim of the rows, which split the batch.
    precision, result: the options of the matmuls, as jax.lax.dot_general takes them. sums: the type in which the gradient of the weights
    is summed over positions, on a device and over devices; None: the type of the weights.
    """

    axis: str
    dim: int
    rows: Dims
    precision: jax.lax.PrecisionLike = None
    result: DTypeLike | None = None
    sums: DTypeLike | None = None

    def split(self, dim: int) -> Dims:
        """The axes of each dim of an array of rows that the ring's axis splits along one of them."""
        return tuple((*axes, self.axis) if n == dim % len(self.rows) else axes for n, axes in enumerate(self.rows))

    def weights(self, dim: int) -> Dims:
        """The axes of weights [k, m] whose dim `dim` the axis splits."""
        return tuple((self.axis,) if n == dim else () for n in range(2))

    def axes(self) -> frozenset[str]:
        """All mesh axes that split rows."""
        return frozenset({self.axis, *(axis for axes in self.rows for axis in axes)})

    def dot(self, rows: jax.Array, weights: jax.Array, contracted: int) -> jax.Array:
        """rows [..., k] times weights, over this dim of the weights."""
        numbers = (((rows.ndim - 1,), (contracted,)), ((), ()))
        return jax.lax.dot_general(rows, weights, numbers, precision=self.precision, preferred_element_type=self.result)

    def next(self, x: jax.Array) -> jax.Array:
        """The array of the previous device."""
        n = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % n) for i in range(n)])

    def sent(self, arrays: Sequence[jx.Atom], sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """The bytes that a device sends of arrays that are gathered, or added up in parts: all but the part that it has or keeps."""
        n, split = sizes[self.axis], math.prod(sizes[axis] for axes in self.rows for axis in axes)
        return (self.axis,), Fraction(sum(map(bytes_of, arrays)), split) * Fraction(n - 1, n)

    def in_order(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The whole array, from its parts in the order of their arrival: this device's part, then the one of the device before it, ..."""
        n, size = len(parts), parts[0].shape[self.dim]
        # Backward they are in the order of the devices, from the next one on. Twice in a row, they begin with device 0 somewhere.
        twice = jax.lax.concatenate([*parts[::-1], *parts[::-1]], self.dim)
        return jax.lax.dynamic_slice_in_dim(twice, (n - 1 - jax.lax.axis_index(self.axis)) * size, n * size, self.dim)

    def part(self, whole: jax.Array, step: int, lane: int, lanes: int) -> jax.Array:
        """The part of the device `step` places back, or the half of it with this number."""
        n = jax.lax.axis_size(self.axis)
        size = whole.shape[self.dim] // n // lanes
        start = ((jax.lax.axis_index(self.axis) - step) % n * lanes + lane) * size
        return jax.lax.dynamic_slice_in_dim(whole, start, size, self.dim)


@dataclass(frozen=True, kw_only=True)
class Gathered(DevicePlan):
    """rows, weights... → rows · weights for each, then, if `keeps`, the whole rows. Rows are split along d, products along their features.

    contracted: the dim of the weights that is summed over; the other one is split.
    """

    ring: Ring
    contracted: int
    keeps: bool

    def axes(self) -> frozenset[str]:
        return self.ring.axes()

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        rows, *weights = arrays
        return [*(self.ring.dot(rows, w, self.contracted) for w in weights), *([rows] if self.keeps else [])]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        ring, num = self.ring, num_operands - 1
        return [ring.split(ring.dim), *[ring.weights(1 - self.contracted)] * num], [*[ring.split(-1)] * num, *[ring.rows] * self.keeps]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        rows, *weights = parts
        ring, n = self.ring, jax.lax.axis_size(self.ring.axis)
        if not weights:
            return [jax.lax.all_gather(rows, ring.axis, axis=ring.dim, tiled=True)]
        arrived: list[list[jax.Array]] = []
        for step in range(n):
            made = [ring.dot(rows, w, self.contracted) for w in weights]
            here = [rows] * self.keeps
            if step < n - 1:
                rows, *made = jax.lax.optimization_barrier((ring.next(rows), *made))
            arrived.append([*made, *here])
        return [ring.in_order(parts) for parts in zip(*arrived, strict=True)]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        return self.ring.sent([equation.invars[0]], sizes, bytes_of)

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[Gathered | None, list[int]]:
        needed = [n for n in range(1, num_operands) if used[n - 1]]
        return (replace(self, keeps=self.keeps and used[-1]) if any(used) else None), [0, *needed]


@dataclass(frozen=True, kw_only=True)
class Scattered(DevicePlan):
    """products..., weights... and, if `fetches`, other rows → the sum of products · weights, then these rows, whole.

    Products are split along features, the sum and the other rows along d. contracted: the dim of the weights that is summed over and split.
    """

    ring: Ring
    contracted: int
    fetches: bool

    def axes(self) -> frozenset[str]:
        return self.ring.axes()

    def _num(self, num_operands: int) -> int:
        return (num_operands - self.fetches) // 2

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        num = self._num(len(arrays))
        first, *others = (self.ring.dot(x, w, self.contracted) for x, w in zip(arrays[:num], arrays[num : 2 * num], strict=True))
        return [sum(others, start=first), *arrays[2 * num :]]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        ring, num = self.ring, self._num(num_operands)
        split = ring.split(ring.dim)
        ins = [*[ring.split(-1)] * num, *[ring.weights(self.contracted)] * num, *[split] * self.fetches]
        return ins, [split, *[ring.rows] * self.fetches]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        ring, n, num = self.ring, jax.lax.axis_size(self.ring.axis), self._num(len(parts))
        products, weights = parts[:num], parts[num]
        if num > 1:
            # Side by side they are one product, to which XLA adds the sum so far within the matmul. What makes them comes before: XLA would
            # compute it once more for each part.
            products, weights = jax.lax.optimization_barrier(products), jax.lax.concatenate(parts[num : 2 * num], self.contracted)
        arrived = [[x] for x in parts[2 * num :]]
        # Half of a sum travels while the other half grows. Without halves, it travels while its next summand is computed.
        lanes = 2 if products[0].shape[ring.dim] // n % 2 == 0 else 1
        sums: list[jax.Array | None] = [None] * lanes
        for step in range(n):
            for lane in range(lanes):
                rows = jax.lax.concatenate([ring.part(x, step + 1, lane, lanes) for x in products], products[0].ndim - 1)
                grown = ring.dot(rows, weights, self.contracted)
                sum_so_far = sums[lane] if lanes == 2 else None
                grown = grown if sum_so_far is None else grown + sum_so_far
                # The sum that was last added to travels; after the last step, sums stay where they are.
                last = lane - 1 if lanes == 2 else 0
                waiting = sums[last] if step < n - 1 or lane == 0 else None
                travels = [*([] if waiting is None else [waiting]), *(others[-1] for others in arrived if lane == 0 and step < n - 1)]
                # The barrier has the weights, too: XLA would make one large matmul of several that read the same, and all sums would wait.
                grown, weights, *moved = jax.lax.optimization_barrier((grown, weights, *map(ring.next, travels)))
                if waiting is not None:
                    sums[last] = moved.pop(0)
                    grown = grown if lanes == 2 else grown + sums[last]
                sums[lane] = grown
                for others, x in zip(arrived, moved, strict=False):
                    others.append(x)
        total = jax.lax.concatenate([x for x in sums if x is not None], ring.dim)
        return [total, *map(ring.in_order, arrived)]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        return self.ring.sent([*equation.invars[-1:] * self.fetches, equation.outvars[0]], sizes, bytes_of)

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[Gathered | Scattered | None, list[int]]:
        num = self._num(num_operands)
        if used[0]:
            return replace(self, fetches=False), list(range(2 * num))
        return (Gathered(ring=self.ring, contracted=0, keeps=True), [2 * num]) if any(used) else (None, [])


def gather_and_multiply(ring: Ring, mesh: Mesh | AbstractMesh, *, keeps: bool) -> Callable[..., list[jax.Array]]:
    """f(rows [..., d, ..., k], weights [k, m]...) → rows · weights for each; the rows are split along d, the products along m.

    keeps: the backward pass finds the whole rows; otherwise it gathers them once more, beside its own matmuls. Where the forward pass is
    computed again before, keeping them costs nothing.
    """
    ahead = Gathered(ring=ring, contracted=0, keeps=False)

    def forward(rows: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        return run_on_devices(ahead, mesh, rows, *weights)

    def with_residuals(rows: jax.Array, *weights: jax.Array) -> tuple[list[jax.Array], _Residuals]:
        if not keeps:
            return forward(rows, *weights), (rows, weights)
        *products, whole = run_on_devices(replace(ahead, keeps=True), mesh, rows, *weights)
        return products, (whole, weights)

    def backward(residuals: _Residuals, cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        rows, weights = residuals
        behind = Scattered(ring=replace(ring, result=rows.dtype), contracted=1, fetches=not keeps)
        by_rows, *fetched = run_on_devices(behind, mesh, *cotangents, *weights, *([] if keeps else [rows]))
        (whole,) = fetched or [rows]
        return by_rows, *(_by_weights(whole, c, w, ring) for c, w in zip(cotangents, weights, strict=True))

    run = cast("jax.custom_vjp[list[jax.Array]]", jax.custom_vjp(forward))
    run.defvjp(with_residuals, backward)
    return run


def multiply_and_scatter(ring: Ring, mesh: Mesh | AbstractMesh) -> Callable[..., list[jax.Array]]:
    """f(products [..., d, ..., m], weights [m, k]) → [their product]: the operands are split along m, the result along d."""

    def forward(rows: jax.Array, weights: jax.Array) -> list[jax.Array]:
        return run_on_devices(Scattered(ring=ring, contracted=0, fetches=False), mesh, rows, weights)

    def with_residuals(rows: jax.Array, weights: jax.Array) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
        return forward(rows, weights), (rows, weights)

    def backward(residuals: tuple[jax.Array, jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        rows, weights = residuals
        behind = Gathered(ring=replace(ring, result=rows.dtype), contracted=1, keeps=True)
        by_rows, whole = run_on_devices(behind, mesh, cotangents[0], weights)
        return by_rows, _by_weights(rows, whole, weights, ring)

    run = cast("jax.custom_vjp[list[jax.Array]]", jax.custom_vjp(forward))
    run.defvjp(with_residuals, backward)
    return run


def _by_weights(rows: jax.Array, cotangent: jax.Array, weights: jax.Array, ring: Ring) -> jax.Array:
    """The gradient of the weights [k, m], summed over all positions, from whole rows [..., k] and whole positions of [..., m]."""
    positions = tuple(range(rows.ndim - 1))
    numbers = ((positions, positions), ((), ()))
    sums = ring.sums or weights.dtype
    return jax.lax.dot_general(rows, cotangent, numbers, precision=ring.precision, preferred_element_type=sums).astype(weights.dtype)
