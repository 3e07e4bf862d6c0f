"""The exchange of rows on a mesh: the device plans that take the place of a call of `experts`, forward and backward.

Rows of the batch are split over some mesh axes, one of which may hold the experts. Each device runs the program of `dispatch`.

The gradient of the weights is a sum over all rows. Along the axes that do not hold experts, each device computes this sum for its own rows
only. The plan returns these partial sums as [parts of an axis, ..., experts, ...]. They are added up outside of the plan, where the
partitioner lays out the sum as the parameter wants it: by a reduce-scatter, if the parameter is split over these axes, too.

`Exchange.served` counts what an exchange did, from the choices alone: rounds that it ran, and rows that it dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.replacements.device_plan import DevicePlan, OfReplicas, SentBytes, plan_of, run_on_devices
from jgt.replacements.experts.call import ExpertCall
from jgt.replacements.experts.dispatch import AllToAll, Dispatch, LocalRows, capacity_of, run_backward, run_forward, with_zeros
from jgt.replacements.gradients import sum_of_parts


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Where rows and experts are, and how they meet.

    rows: the mesh axes of each dim of x. axis: the axis that holds the experts; None: each device has them all. sizes: the sizes of all of
    these axes. capacity_factor: the rows that each pair of devices has room for, over their number if all experts are chosen equally often.
    drops: whether rows beyond the capacity are dropped.
    """

    rows: Dims
    sizes: tuple[tuple[str, int], ...]
    axis: str | None = None
    capacity_factor: float = 1.0
    drops: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The axes whose devices have parts of the weights' gradients."""
        return tuple(axis for axes in self.rows for axis in axes if axis != self.axis)

    @property
    def num_parts(self) -> int:
        """The number of parts into which these axes split the rows."""
        return math.prod(size for axis, size in self.sizes if axis in self.parts)

    @property
    def num_devices(self) -> int:
        """The number of devices that share the experts."""
        return dict(self.sizes).get(self.axis or "", 1)

    def capacity(self, num_tokens: int, num_choices: int) -> int:
        """The rows of a round for each pair of devices, if a device has this many tokens."""
        return capacity_of(num_tokens, num_choices, self.num_devices, self.capacity_factor)

    def dispatch(self, choice: jax.Array, num_local: int) -> Dispatch:
        """The way of the rows of one device's choices [T, k] to the experts."""
        if self.axis is None or self.num_devices == 1:
            return LocalRows.of(choice, num_local)
        return AllToAll.of(choice, num_local, self.axis, self.capacity_factor, drops=self.drops)

    def experts(self, rank: int) -> Dims:
        """The axes of an array [experts, ...] of this rank."""
        return ((self.axis,) if self.axis else (), *[()] * (rank - 1))

    def can_count(self, num_rows: int, num_experts: int) -> bool:
        """Whether the counts of rows of the batch say what each device sends: no other dim of the tokens is split."""
        return not any(self.rows[1:]) and num_rows % (self.num_parts * self.num_devices) == num_experts % self.num_devices == 0

    def served(self, counts: jax.Array, num_tokens: int, num_choices: int) -> tuple[jax.Array, jax.Array]:
        """The rounds that the exchange runs, int32[...], and the share of rows that it drops, f32[...].

        They follow from the number of rows that each device sends to each, which is a sum of counts, since the rules say which rows are on
        which device. counts: int[..., rows, experts], the choices of each expert in each row of the batch. num_tokens: the number of tokens
        in a row. num_choices: the number of choices of a token.
        """
        *outer, num_rows, num_experts = counts.shape
        n, num_parts = self.num_devices, self.num_parts
        assert self.axis is not None
        axes, sizes = self.rows[0], dict(self.sizes)
        split = counts.reshape(*outer, *(sizes[axis] for axis in axes), num_rows // (n * num_parts), num_experts)
        of_device = jnp.moveaxis(jnp.sum(split, axis=-2), len(outer) + axes.index(self.axis), len(outer))
        # The rows from each device, in each part of the mesh, to each device.
        pairs = jnp.sum(of_device.reshape(*outer, n, num_parts, n, num_experts // n), axis=-1)
        capacity = self.capacity(num_tokens * num_rows // (n * num_parts), num_choices)
        inner = (-3, -2, -1)
        if self.drops:
            dropped = jnp.sum(jnp.maximum(pairs - capacity, 0), axis=inner) / math.prod((num_tokens, num_rows, num_choices))
            return jnp.ones(outer, jnp.int32), dropped
        return -(-jnp.max(pairs, axis=inner) // capacity), jnp.zeros(outer, jnp.float32)


@dataclass(frozen=True, kw_only=True)
class _Direction(DevicePlan):
    """The common part of both directions. ranks: the rank of each array of the weights."""

    call: ExpertCall
    exchange: Exchange
    ranks: tuple[int, ...]

    def axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.exchange.rows for axis in axes)

    def filled(self, equation: jx.Equation) -> Fraction:
        """The share of the rows of a round that are there, if all experts are chosen equally often."""
        if self.exchange.axis is None or self.exchange.num_devices == 1:
            return Fraction(1)
        num_tokens, num_choices = self._tokens_and_choices(equation)
        return Fraction(num_tokens * num_choices, self.exchange.num_devices * self.exchange.capacity(num_tokens, num_choices))

    def _tokens_and_choices(self, equation: jx.Equation) -> tuple[int, int]:
        """The number of tokens of one device, and the number of choices of each token."""
        *outer, num_choices = jx.shape_of(equation.invars[len(self.ranks) + 1])
        # Where the axis is manual, the equation has one device's tokens only.
        is_split = any(self.exchange.axis in axes for axes in self.exchange.rows)
        return math.prod(outer) // (self.exchange.num_parts * (self.exchange.num_devices if is_split else 1)), num_choices

    def _operands(self) -> list[Dims]:
        tokens = self.exchange.rows
        return [*(self.exchange.experts(rank) for rank in self.ranks), tokens, tokens, tokens]

    def _local(self, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        return [v.reshape(-1, v.shape[-1]) for v in (x, *others)]

    def _sent(self, equation: jx.Equation, bytes_of: Callable[[jx.Atom], int], travelling: Sequence[jx.Atom], scales: int) -> SentBytes:
        """The bytes that a device sends in a round: rows of these arrays, `scales` times their scales, and the counts before them."""
        exchange, n, axis = self.exchange, self.exchange.num_devices, self.exchange.axis
        if axis is None or n == 1:
            return None
        *_, choice, scale = equation.invars[: len(self.ranks) + 3]
        num_tokens, num_choices = self._tokens_and_choices(equation)
        tokens = math.prod(jx.shape_of(choice)[:-1])
        of_token = sum(Fraction(bytes_of(array), tokens) for array in travelling)
        of_scale = Fraction(bytes_of(scale), tokens * num_choices)
        rows = n * exchange.capacity(num_tokens, num_choices)
        counts = 4 * jx.shape_of(equation.invars[0])[0]
        return (axis,), Fraction(n - 1, n) * (rows * (of_token + scales * of_scale) + counts)


@dataclass(frozen=True, kw_only=True)
class Forward(_Direction):
    """Weights, x, choice, scale → y."""

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        return self.call.meaning(*arrays)

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        return self._operands(), [self.exchange.rows]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        *leaves, x, choice, scale = parts
        tokens, choices, scales = self._local(x, choice, scale)
        y = run_forward(self.call, self.exchange.dispatch(choices, leaves[0].shape[0]), leaves, tokens, scales)
        return [y.reshape(*x.shape[:-1], y.shape[-1])]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        return self._sent(equation, bytes_of, [equation.invars[len(self.ranks)], equation.outvars[0]], scales=0)


@dataclass(frozen=True, kw_only=True)
class Backward(_Direction):
    """Weights, x, choice, scale, the cotangent of y → gradients of the weights [parts, ..., experts, ...], of x and of scale."""

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        *leaves, x, choice, scale, cotangent = arrays

        def run(scale: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
            return self.call.meaning(*leaves, x, choice, scale)[0]

        pull = cast("Callable[[jax.Array], tuple[jax.Array, ...]]", jax.vjp(run, scale, x, *leaves)[1])
        by_scale, by_x, *by_weights = pull(cotangent)
        by_weights = map(with_zeros, by_weights, leaves)
        # Only the sum of the parts has a meaning.
        more = [(0, size - 1) for axis, size in self.exchange.sizes if axis in self.exchange.parts]
        first = [jnp.pad(g.reshape([1] * len(more) + [*g.shape]), [*more, *[(0, 0)] * g.ndim]) for g in by_weights]
        return [*first, by_x, by_scale]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        rows = self.exchange.rows
        weights = [(*((axis,) for axis in self.exchange.parts), *self.exchange.experts(rank)) for rank in self.ranks]
        return [*self._operands(), rows], [*weights, rows, rows]

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        *leaves, x, choice, scale, cotangent = parts
        tokens, choices, scales, behind = self._local(x, choice, scale, cotangent)
        dispatch = self.exchange.dispatch(choices, leaves[0].shape[0])
        by_weights, by_x, by_scale = run_backward(self.call, dispatch, leaves, tokens, scales, behind)
        ones = [1] * len(self.exchange.parts)
        return [*(g.reshape([*ones, *g.shape]) for g in by_weights), by_x.reshape(x.shape), by_scale.reshape(scale.shape)]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        num = len(self.ranks)
        x, cotangent = equation.invars[num], equation.invars[num + 3]
        # x and the cotangent go to the experts with their scales, and the gradients of x and of the scales come back.
        return self._sent(equation, bytes_of, [x, cotangent, x], scales=2)


def run_on(call: ExpertCall, exchange: Exchange, mesh: Mesh | AbstractMesh | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The call's result on a mesh, with a derivative that runs on it, too."""
    ranks = tuple(x.ndim for x in operands[:-3])
    ahead = Forward(call=call, exchange=exchange, ranks=ranks)
    behind = Backward(call=call, exchange=exchange, ranks=ranks)

    @jax.custom_vjp
    def run(*operands: jax.Array) -> jax.Array:
        return run_on_devices(ahead, mesh, *operands)[0]

    def forward(*operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return run_on_devices(ahead, mesh, *operands)[0], operands

    def backward(operands: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
        *by_weights, by_x, by_scale = run_on_devices(behind, mesh, *operands, cotangent)
        is_real = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands]
        sums = (sum_of_parts(parts, len(exchange.parts)) if real else None for parts, real in zip(by_weights, is_real, strict=False))
        return *sums, by_x, None, by_scale

    run.defvjp(forward, backward)
    return [run(*operands)]


def exchange_of(equation: jx.Equation) -> tuple[Forward | Backward, jx.Equation] | None:
    """The exchange of rows that an equation is, with the equation; None for any other equation. Several replicas have one's exchange."""
    plan = plan_of(equation)
    if isinstance(plan, OfReplicas):
        plan, equation = plan.plan, plan.of_one(equation)
    return (plan, equation) if isinstance(plan, Forward | Backward) else None


def weights_of(equation: jx.Equation) -> list[tuple[jx.Var, Dims]]:
    """The weights that a call of experts reads, on a mesh or without one, and the axes of their dims; nothing for any other equation."""
    plan = plan_of(equation)
    one = plan.plan if isinstance(plan, OfReplicas) else plan
    if plan is None or not isinstance(one, ExpertCall | Forward | Backward):
        return []
    call = one if isinstance(one, ExpertCall) else one.call
    weights, (dims, _) = equation.invars[: call.num_weights], plan.layout(len(equation.invars))
    return [(var, axes) for var, axes in zip(weights, dims, strict=False) if jx.is_var(var)]
