"""The regions that take the place of a call of `experts` on a mesh: forward and backward.

Rows of the batch are split over some mesh axes, one of which may hold the experts. Each device runs the program of `jgt.experts.exchange`.

The gradient of the weights is a sum over all rows. Along the axes that do not hold experts, each device computes this sum for its own rows
only. The region returns these partial sums as [parts of an axis, ..., experts, ...]. They are added up outside of the region, where the
partitioner lays out the sum as the parameter wants it: by a reduce-scatter, if the parameter is split over these axes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.experts.call import ExpertCall
from jgt.experts.exchange import Traffic, run_backward, run_forward
from jgt.experts.rooms import Rooms, room_of
from jgt.experts.whole import WholeTokens, capacity_of
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.regions.region import SentBytes, run_region

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Where rows and experts are, and how they meet.

    rows: the mesh axes of each dim of x. axis: the one that holds the experts; None: each device has them all. sizes: of all of these.
    """

    rows: Dims
    sizes: tuple[tuple[str, int], ...]
    axis: str | None = None
    method: Literal["all-to-all", "gather", "ragged"] = "all-to-all"
    room: float = 1.0
    drops: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The axes whose devices have parts of the weights' gradients."""
        return tuple(axis for axes in self.rows for axis in axes if axis != self.axis)

    @property
    def num_parts(self) -> int:
        """Into how many parts these axes split the rows."""
        return math.prod(size for axis, size in self.sizes if axis in self.parts)

    @property
    def num_devices(self) -> int:
        """The number of devices that share the experts."""
        return dict(self.sizes).get(self.axis or "", 1)

    def traffic(self, choice: jax.Array, num_local: int) -> Traffic:
        """How the rows of one device's choices [T, k] travel to its experts and to others'."""
        if self.axis is None or self.num_devices == 1:
            return WholeTokens.of(choice, num_local, None, self.room, drops=False)
        if self.method == "gather":
            return WholeTokens.of(choice, num_local, self.axis, self.room, drops=self.drops)
        return Rooms.of(choice, num_local, self.axis, self.room, self.method, drops=self.drops)

    def experts(self, rank: int) -> Dims:
        """The axes of an array [experts, ...] of this rank."""
        return ((self.axis,) if self.axis else (), *[()] * (rank - 1))


_OTHERS: dict[str, Literal["all-to-all", "gather"]] = {"all-to-all": "gather", "gather": "all-to-all"}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What both directions share. ranks: of the weights."""

    call: ExpertCall
    exchange: Exchange
    ranks: tuple[int, ...]

    def axes(self) -> frozenset[str]:
        """See `RegionPlan`."""
        return frozenset(axis for axes in self.exchange.rows for axis in axes)

    def num_choices(self, equation: jx.Equation) -> int:
        """The choices of each token, in an equation with this plan."""
        return jx.shape_of(equation.invars[len(self.ranks) + 1])[-1]

    def filled(self, equation: jx.Equation) -> Fraction:
        """The share of the rows of a round that are there, if all experts are chosen equally often."""
        exchange, n, room = self.exchange, self.exchange.num_devices, self.exchange.room
        num_choices, num_tokens = self.num_choices(equation), self._num_tokens(equation)
        if exchange.axis is None or n == 1:
            return Fraction(1)
        gathered = exchange.method == "gather"
        rows = capacity_of(num_tokens, num_choices, n, room) if gathered else n * room_of(num_tokens, num_choices, n, room)
        return Fraction(num_tokens * num_choices, rows)

    def _num_tokens(self, equation: jx.Equation) -> int:
        """The tokens of one device."""
        # Where the axis is manual, the equation has these only.
        is_split = any(self.exchange.axis in axes for axes in self.exchange.rows)
        tokens = math.prod(jx.shape_of(equation.invars[len(self.ranks) + 1])[:-1])
        return tokens // (self.exchange.num_parts * (self.exchange.num_devices if is_split else 1))

    def otherwise(self) -> Self | None:
        """The same, but all-to-all instead of gather, or gather instead of all-to-all; None if this plan does neither."""
        other = _OTHERS.get(self.exchange.method)
        if other is None or self.exchange.axis is None or self.exchange.num_devices == 1:
            return None
        return replace(self, exchange=replace(self.exchange, method=other))

    def _operands(self) -> list[Dims]:
        tokens = self.exchange.rows
        return [*(self.exchange.experts(rank) for rank in self.ranks), tokens, tokens, tokens]

    def _local(self, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        return [v.reshape(-1, v.shape[-1]) for v in (x, *others)]

    def _sent(self, equation: jx.Equation, bytes_of: Callable[[jx.Atom], int], travelling: Sequence[jx.Atom], scales: int) -> SentBytes:
        """What a device sends in a round: rows of these arrays, each `scales` times their scales, and the counts or choices before them."""
        exchange, n, axis = self.exchange, self.exchange.num_devices, self.exchange.axis
        if axis is None or n == 1:
            return None
        *_, choice, scale = equation.invars[: len(self.ranks) + 3]
        num_choices, num_tokens = self.num_choices(equation), self._num_tokens(equation)
        tokens = math.prod(jx.shape_of(choice)[:-1])
        of_token = sum(Fraction(bytes_of(array), tokens) for array in travelling)
        of_scale = Fraction(bytes_of(scale), tokens * num_choices)
        if exchange.method == "gather":
            # Scales come once; backward, their gradients return.
            of_choice = Fraction(bytes_of(choice), tokens * num_choices) + of_scale * max(scales, 1)
            return (axis,), (n - 1) * num_tokens * (of_token + num_choices * of_choice)
        rows = n * room_of(num_tokens, num_choices, n, exchange.room)
        counts = 4 * jx.shape_of(equation.invars[0])[0]
        return (axis,), Fraction(n - 1, n) * (rows * (of_token + scales * of_scale) + counts)


@dataclass(frozen=True, kw_only=True)
class Forward(_Part):
    """Weights, x, choice, scale → y."""

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        return self.call.meaning(*arrays)

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        """See `RegionPlan`."""
        return self._operands(), [self.exchange.rows]

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[Forward | None, list[int]]:
        """See `RegionPlan`."""
        return (self, list(range(num_operands))) if any(used) else (None, [])

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        *leaves, x, choice, scale = parts
        tokens, choices, scales = self._local(x, choice, scale)
        y = run_forward(self.call, self.exchange.traffic(choices, leaves[0].shape[0]), leaves, tokens, scales)
        return [y.reshape(*x.shape[:-1], y.shape[-1])]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """See `RegionPlan`."""
        return self._sent(equation, bytes_of, [equation.invars[len(self.ranks)], equation.outvars[0]], scales=0)


@dataclass(frozen=True, kw_only=True)
class Backward(_Part):
    """Weights, x, choice, scale, the cotangent of y → gradients of the weights [parts, ..., experts, ...], of x and of scale.

    wanted: which of these there are.
    """

    wanted: tuple[bool, ...]

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        *leaves, x, choice, scale, cotangent = arrays

        def run(scale: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
            return self.call.meaning(*leaves, x, choice, scale)[0]

        pull = cast("Callable[[jax.Array], tuple[jax.Array, ...]]", jax.vjp(run, scale, x, *leaves)[1])
        by_scale, by_x, *by_weights = pull(cotangent)
        # Only the sum of the parts has a meaning.
        more = [(0, size - 1) for axis, size in self.exchange.sizes if axis in self.exchange.parts]
        first = [jnp.pad(g.reshape([1] * len(more) + [*g.shape]), [*more, *[(0, 0)] * g.ndim]) for g in by_weights]
        return self._those([*first, by_x, by_scale])

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        """See `RegionPlan`."""
        rows = self.exchange.rows
        weights = [(*((axis,) for axis in self.exchange.parts), *self.exchange.experts(rank)) for rank in self.ranks]
        return [*self._operands(), rows], self._those([*weights, rows, rows])

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[Backward | None, list[int]]:
        """See `RegionPlan`. All results come from one pass over the rows, and XLA leaves out what nothing reads."""
        wanted = iter(used)
        left = tuple(is_wanted and next(wanted) for is_wanted in self.wanted)
        return (replace(self, wanted=left), list(range(num_operands))) if any(used) else (None, [])

    def _those(self, results: Sequence[_T]) -> list[_T]:
        return [result for result, is_wanted in zip(results, self.wanted, strict=True) if is_wanted]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        *leaves, x, choice, scale, cotangent = parts
        tokens, choices, scales, behind = self._local(x, choice, scale, cotangent)
        traffic = self.exchange.traffic(choices, leaves[0].shape[0])
        by_weights, by_x, by_scale = run_backward(self.call, traffic, leaves, tokens, scales, behind)
        ones = [1] * len(self.exchange.parts)
        return self._those([*(g.reshape([*ones, *g.shape]) for g in by_weights), by_x.reshape(x.shape), by_scale.reshape(scale.shape)])

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """See `RegionPlan`."""
        num = len(self.ranks)
        x, cotangent = equation.invars[num], equation.invars[num + 3]
        # x and the cotangent go to the experts with their scales, and the gradients of x and of the scales come back.
        return self._sent(equation, bytes_of, [x, cotangent, x], scales=2)


def _sum_of_parts(parts: jax.Array, num_axes: int) -> jax.Array:
    # Axis by axis: of a sum over several axes at once, XLA makes an all-reduce, even if the parameter is split over one of them.
    for dim in reversed(range(num_axes)):
        # In the type of the weights, as gradients of other matrices: jnp.sum would send f32.
        parts = jax.lax.reduce_sum(parts, [dim])
        # XLA would make one sum of two.
        parts = cast(jax.Array, jax.lax.optimization_barrier(parts)) if dim else parts
    return parts


def run_on(call: ExpertCall, exchange: Exchange, mesh: Mesh | AbstractMesh | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The call's result on a mesh, with a derivative that runs on it, too."""
    ranks = tuple(x.ndim for x in operands[:-3])
    ahead = Forward(call=call, exchange=exchange, ranks=ranks)
    behind = Backward(call=call, exchange=exchange, ranks=ranks, wanted=(True,) * (len(ranks) + 2))

    @jax.custom_vjp
    def run(*operands: jax.Array) -> jax.Array:
        return run_region(ahead, mesh, *operands)[0]

    def forward(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return run_region(ahead, mesh, *operands)[0], operands

    def backward(operands: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        *by_weights, by_x, by_scale = run_region(behind, mesh, *operands, cotangent)
        return *(_sum_of_parts(parts, len(exchange.parts)) for parts in by_weights), by_x, None, by_scale

    run.defvjp(forward, backward)
    return [run(*operands)]
