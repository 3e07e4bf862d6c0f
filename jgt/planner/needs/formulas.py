"""The bytes that a layout has to send, by textbook formulas, to compare with those that the compiled program does send.

`usage` counts how often each parameter is used, which matmuls leave partial sums, and what the program sends itself. The formulas turn
that into bytes. By the ring algorithms of `jgt.planner.hlo.collectives` a device sends (n-1) b in an all-gather of shards of b bytes,
(n-1)/n B in a reduce-scatter of an array of B bytes, and twice that in an all-reduce. Hence:

ZeRO-3 (arXiv 1910.02054, section 7). A parameter of b bytes on each device, sharded over n devices that split the batch, is gathered
    once for the forward pass and once for the backward pass: (n-1) b each, in the type that matmuls read. A table that both passes read
    in one place is gathered once, and eight bits once more in a recompute. Its gradient is reduce-scattered: (n-1)/n n b = (n-1) b.
ZeRO-1. A parameter whose optimizer state is sharded over k devices, while the parameter is not, has its gradient reduce-scattered,
    (k-1)/k b, and is gathered after the update: (k-1) b/k. One that is stored like its state is gathered when the step starts instead.
Data parallelism. The m devices that split the batch and neither of the two all-reduce the gradient: 2 (m-1)/m b.
Tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3). A matmul that contracts a dim that is sharded over n devices leaves a
    partial sum on each. Adding up partial sums of B bytes takes an all-reduce: 2 (n-1)/n B.
Sequence parallelism (arXiv 2205.05198, section 4.2). The sum stays split: a reduce-scatter, (n-1)/n B, and an all-gather before the next
    matmul, (n-1)/n B. The recompute gathers the operand of a matmul once more for the gradient of the weights: (n-1)/n B.
Replicas (`jgt.replacements`). The program says how many numbers a device has of a sum over R replicas. Their all-reduce sends 2 (R-1)/R
    times their bytes, in the type in which they travel. In int8 the program names the collectives itself.
shard_map. The program names its collectives itself, so their bytes follow from the ring algorithms.

No formula covers losses, norms and small constants, so a program may send a little more. All counts are of a training step.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from jgt.planner.hlo.origin import NONE
from jgt.planner.layouts import OPTIMIZER, Parameter
from jgt.planner.needs.equations import Backend, MeshAxes, all_reduced
from jgt.planner.needs.partial import partial_bytes
from jgt.planner.needs.usage import ParameterUse, Usage
from jgt.program.dims import num_parts


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The bytes on the wire that a formula predicts for one signal over some mesh axes, from one device in a step."""

    signal: str
    axes: MeshAxes
    bytes: int
    formula: str


def expected(params: Sequence[Parameter], usage: Usage) -> tuple[Expected, ...]:
    """The bytes that a program's layout must send, by signal, axes and formula."""
    mesh, backend = usage.mesh, usage.backend
    # Over the others replicas add up gradients by their own means.
    reduced = tuple(axis for axis in usage.batch if not any(axis in axes for axes in usage.summed))
    rows: collections.Counter[tuple[str, MeshAxes, str]] = collections.Counter({key: round(count) for key, count in usage.sent.items()})
    # The all-to-alls of experts and the scales of eight bits keep sums in the loop over the parts of a batch.
    adds_parts = not usage.has_experts and all(use.read_width == use.width for use in usage.parameters)
    for p, use in zip(params, usage.parameters, strict=True):
        # A parameter that several signals use (a tied embedding) is charged to the first.
        signal = p.signals[0] if p.signals else NONE
        gradients = _gradients(p, use, mesh, reduced, backend, adds_parts=adds_parts)
        for axes, count, formula in [*_gathers(p, use, mesh, usage.batch), *gradients]:
            rows[signal, axes, formula] += round(count)
        # ZeRO-1: each device updates its part of a parameter, by its part of the optimizer state, and the parts are gathered.
        more = tuple(a for a in mesh if mesh[a] > 1 and a in _axes(p.state_dims) - _axes(p.dims))
        k = num_parts(more, mesh)
        rows[OPTIMIZER, more, "parameters gathered after their update"] += (k - 1) * p.local_bytes // k
    for partial in usage.partial_sums:
        rows[partial.signal, partial.axes, "all-reduce of partial sums"] += round(partial_bytes(partial, mesh, backend))
    # A formula over a single device gives 0.
    return tuple(Expected(signal=s, axes=a, bytes=n, formula=f) for (s, a, f), n in sorted(rows.items()) if n)


def _gathers(p: Parameter, use: ParameterUse, mesh: Mapping[str, int], batch: MeshAxes) -> Iterator[tuple[MeshAxes, Fraction, str]]:
    # A parameter that the program gathers itself is counted there, as shard_map's.
    if use.is_gathered:
        return
    axes = tuple(a for a in batch if a in _axes(p.dims) - use.held)
    # shard_map brings a parameter into its region once, however often it is used inside.
    times = Fraction(1) if use.is_manual else sum(use.counts.values(), Fraction(0))
    brought = tuple(a for a in axes if a in use.brought)
    rest = tuple(a for a in axes if a not in use.brought)
    n, k = num_parts(brought, mesh), num_parts(rest, mesh)
    yield brought, Fraction(n - 1) * p.local_bytes * use.width, "parameters gathered at the start"
    yield rest, times * (k - 1) * n * p.local_bytes * use.read_width, "parameters gathered"


def _gradients(
    p: Parameter, use: ParameterUse, mesh: Mapping[str, int], batch: MeshAxes, backend: Backend, *, adds_parts: bool
) -> Iterator[tuple[MeshAxes, Fraction, str]]:
    """ZeRO-3, ZeRO-1 and data parallelism: each axis that splits the batch adds up the gradient in one of three ways."""
    if use.is_manual or not p.gradient_bytes:
        # Inside shard_map the program adds up gradients itself.
        return
    stored, scattered = _axes(p.dims), _axes(p.state_dims)
    batch = tuple(a for a in batch if a not in use.held)
    zero3 = tuple(a for a in batch if a in stored)
    zero1 = tuple(a for a in batch if a in scattered - stored)
    whole = tuple(a for a in batch if a not in scattered | stored)
    n, k, m = (num_parts(axes, mesh) for axes in (zero3, zero1, whole))
    sent = use.counts["forward"] * p.local_bytes * use.width
    # A CPU's all-reduce sends twice as much as a reduce-scatter.
    passes = 1 if backend.is_gpu else 2
    # Where each part of the batch gathers the parameter, it scatters the gradient too. Sums of others XLA moves out of the loop.
    once = sent / use.parts if adds_parts else sent
    yield zero3, (once if use.brought.issuperset(zero3) else sent) * (n - 1) * passes, "gradients reduce-scattered"
    yield zero1, once * Fraction(k - 1, k) * passes, "gradients reduce-scattered"
    yield whole, once * all_reduced(m), "gradients all-reduced"


def _axes(dims: Sequence[MeshAxes]) -> frozenset[str]:
    return frozenset(axis for axes in dims for axis in axes)
