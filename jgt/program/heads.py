"""cuDNN's attention on the devices of a pipeline's stage: each of them computes some of the heads.

JAX splits this kernel over devices by a custom partitioning, which asks the mesh for its devices. Inside a shard_map that leaves some axes
to the partitioner, as a pipeline's stage is, the mesh is abstract and has none, so compilation fails. Here the kernel's primitives are
lowered differently in this case: as a shard_map over the axes that are left. Inside it all axes are manual, and the kernel runs as it
is on the heads of its device.

The forward and the backward pass are one primitive each, and both are replaced after differentiation. So nothing differentiates through
the shard_map, and the residuals are the kernel's own. Anywhere else JAX's own rule applies.

This file depends on internals of JAX, whose facts are in tests/program/test_heads.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import mlir as internal
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

from jgt.document import InputError

_HEADS = {0: 2, 1: 1}
"""The dim of the heads, by JAX's number of the layout: [batch, seq, heads, head] and [batch, heads, seq, head]."""
_NUM_INPUTS = 10
"""q, k, v, the bias, and six arrays of lengths, offsets and pages. Backward, log-sum-exp, output and its cotangent follow."""


@functools.cache
def split_heads_in_stages() -> None:
    """Registers the lowering, once in a process."""
    for name in ("fwd", "bwd"):
        primitive = getattr(cudnn, f"_dot_product_attention_{name}_p_wrapper")
        own = getattr(internal, "_lowerings")[primitive].rule  # noqa: B009 - private names, which tests/program/test_heads.py checks
        # Not cached: what a lowering is depends on the axes that are manual around it.
        mlir.register_lowering(primitive, functools.partial(_lowered, primitive, own), cacheable=False)


def _lowered(primitive: Any, plain: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    around = ctx.module_context.axis_context
    # Only a program under jit has a mesh there, and only inside a shard_map are some of its axes manual.
    mesh, manual = getattr(around, "mesh", None), getattr(around, "manual_axes", frozenset[str]())
    rest = set[str]() if mesh is None else set(mesh.axis_names) - set(manual)
    if mesh is None or not manual or not rest:
        return plain(ctx, *operands, **params)
    free = tuple(axis for axis in mesh.axis_names if axis in rest and mesh.shape[axis] > 1)
    heads = _HEADS[params["layout"]]
    _check_heads(ctx.avals_in, heads, free, math.prod(mesh.shape[axis] for axis in free))

    def on_device(*local: jax.Array) -> list[jax.Array]:
        results = list(primitive.impl(*local, **params))
        if _has_bias_gradient(params) and not outs[3]:
            # The gradient of a bias that all heads share is the sum over them.
            results[3] = jax.lax.psum(results[3], free)
        return results

    ins, outs = _specs(ctx.avals_in, params, heads, free)
    split = jax.shard_map(on_device, in_specs=ins, out_specs=outs, axis_names=rest, check_vma=False)
    abstract = getattr(mesh, "abstract_mesh", mesh).update_axis_types(dict.fromkeys(manual, AxisType.Manual))
    # The mesh of the trace is gone here, and a nested shard_map looks for it.
    with jax.sharding.use_abstract_mesh(abstract):
        lower = cast("Callable[..., Any]", mlir.lower_fun(split, multiple_results=True))
        return lower(ctx, *operands)


def _specs(avals: Sequence[Any], params: dict[str, Any], heads: int, free: tuple[str, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """Where the operands and the results go: everything that has heads is split by them."""
    split = PartitionSpec(*(free if dim == heads else None for dim in range(4)))
    # The bias is [batch, heads, seq, seq] in both layouts, or has 1 head for all. log-sum-exp is [batch, heads, seq].
    bias = PartitionSpec(None, free) if avals[3].ndim == 4 and avals[3].shape[1] > 1 else PartitionSpec()
    by_head = PartitionSpec(None, free)
    ins = [split, split, split, bias, *[PartitionSpec()] * (len(avals) - 4)]
    if "is_training" in params:
        return tuple(ins), [split, by_head] if params["is_training"] else [split]
    ins[_NUM_INPUTS : _NUM_INPUTS + 3] = [by_head, split, split]
    return tuple(ins), [split, split, split, *([bias] if _has_bias_gradient(params) else [])]


def _has_bias_gradient(params: dict[str, Any]) -> bool:
    return "is_training" not in params and bool(params["variadic_args"][1])


def _check_heads(avals: Sequence[Any], heads: int, free: tuple[str, ...], size: int) -> None:
    """Raises InputError if the devices of a stage cannot have equal numbers of heads."""
    wrong = [count for count in (avals[0].shape[heads], avals[1].shape[heads]) if count % size]
    if wrong:
        raise InputError(
            [
                f"cuDNN's attention has {wrong[0]} heads, which do not divide over the {size} devices of a pipeline's stage "
                f"({' x '.join(free)}). Use fewer devices in these axes, or XLA's attention"
            ]
        )
