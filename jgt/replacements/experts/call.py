"""Experts without a mesh: rows sorted by the expert that was chosen for them, run through their experts, and put back.

    y = experts(ffn, weights, x, choice, scale)    # weights: arrays [experts, ...]; x [..., d]; choice, scale [..., k]

Each row of x goes through k of the experts, and the results, times their scales, are added up. That is all that a model says. In a traced
program it is one equation (`jgt.replacements.device_plan`), which runs this meaning as long as nothing replaces it, and keeps the model's
function: `jgt.replacements.experts.experts` traces it again for the rows and the experts of one device.

The derivative of a gather is a scatter, which adds rows one by one because it cannot know that no two of them meet. Here they don't: rows
are permuted, and the inverse permutation is at hand. So both directions are gathers: forward by the one, backward by the other.

n stands for a number of rows, d and d' for their widths, k for the choices of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.program.places import exclude_lines
from jgt.program.tracing import evaluate, trace
from jgt.replacements.device_plan import DevicePlan, run_on_devices
from jgt.replacements.experts.grouped import with_grouped_matmuls

# The line of a call of experts is the model's.
exclude_lines(Path(__file__).parent)

ExpertFn = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""(rows [n, d], sizes [experts], weights) → [n, d']. The first sizes[0] rows belong to expert 0, the next sizes[1] to expert 1, and so on.

Rows behind the last group belong to none: their results are not read.
"""


@dataclass(frozen=True, kw_only=True)
class ExpertCall(DevicePlan):
    """One call of `experts`, as the model has it. Its operands are the leaves of the weights, x, choice and scale.

    tree: the tree of the weights. held_by: the manual axis whose devices share the experts, if the weights are one device's.
    """

    fn: ExpertFn
    tree: Any
    held_by: str | None = None

    @property
    def num_weights(self) -> int:
        """The number of arrays in the weights."""
        return self.tree.num_leaves

    def run(self, leaves: Sequence[jax.Array], rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """The model's function, on some rows and some experts, with matmuls that multiply each row once."""

        def call(rows: jax.Array, sizes: jax.Array, *leaves: jax.Array) -> jax.Array:
            return self.fn(rows, sizes, jax.tree.unflatten(self.tree, leaves))

        arguments = rows, sizes, *leaves
        program, _ = trace(call, *arguments)
        (result,) = evaluate(with_grouped_matmuls(program), arguments)
        return result

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        *leaves, x, choice, scale = arrays
        num_choices = choice.shape[-1]
        order, place, sizes = sorted_by_expert(choice, leaves[0].shape[0])
        rows = rows_at(x.reshape(-1, x.shape[-1]), order, place, num_choices)
        results = rows_at(self.run(leaves, rows, sizes), place, order)
        # Scales are f32 beside rows of bf16: the sum is rounded once.
        y = weighted_sum(results.reshape(-1, num_choices, results.shape[-1]), scale.reshape(-1, num_choices))
        return [y.reshape(*x.shape[:-1], y.shape[-1])]

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        return [()] * num_operands, [()]


def experts(fn: ExpertFn, weights: object, x: jax.Array, choice: jax.Array, scale: jax.Array) -> jax.Array:
    """Each row of x [..., d] through the experts chosen for it, times scale, added up: [..., d'].

    fn(rows [n, d], sizes [experts], weights) → [n, d'] runs rows that are sorted by expert. It maps each row on its own and closes over no
    arrays. weights: a tree of arrays [experts, ...]. choice [..., k]: the numbers of k experts for each row. scale [..., k]: real numbers.

    Rules may say which mesh axis holds the experts (`experts:`); the rows then travel to them and back.

    Raises ValueError for arrays of other shapes or types, and for a function that closes over arrays.
    """
    leaves, tree = [jnp.asarray(leaf) for leaf in jax.tree.leaves(weights)], cast(Any, jax.tree.structure(weights))
    _check(leaves, x, choice, scale)
    call = ExpertCall(fn=fn, tree=tree)
    _check_function(call, leaves, x)
    return run_on_devices(call, None, *leaves, x, choice, scale)[0]


def _check(leaves: Sequence[jax.Array], x: jax.Array, choice: jax.Array, scale: jax.Array) -> None:
    counts = {leaf.shape[:1] for leaf in leaves}
    if len(counts) != 1 or counts == {()}:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves) or "none"
        raise ValueError(f"weights of experts are arrays [experts, ...] with one number of experts, not {shapes}")
    if choice.shape != scale.shape or choice.shape[:-1] != x.shape[:-1] or x.ndim < 2:
        raise ValueError(
            f"experts take x [..., d] and, for each of its rows, choice and scale [..., k], not {list(x.shape)}, {list(choice.shape)} "
            f"and {list(scale.shape)}"
        )
    if not jnp.issubdtype(choice.dtype, jnp.integer):
        raise ValueError(f"choice has the numbers of experts, so its type is an integer type, not {choice.dtype}")
    ((num_experts,),) = counts
    if choice.shape[-1] > num_experts:
        raise ValueError(f"each row chooses {choice.shape[-1]} of {num_experts} experts. Choose {num_experts} at most")


def _check_function(call: ExpertCall, leaves: Sequence[jax.Array], x: jax.Array) -> None:
    rows = jax.ShapeDtypeStruct((8, x.shape[-1]), x.dtype)
    sizes = jax.ShapeDtypeStruct(leaves[0].shape[:1], jnp.int32)

    def run(rows: jax.Array, sizes: jax.Array, *leaves: jax.Array) -> jax.Array:
        return call.run(leaves, rows, sizes)

    program = jax.make_jaxpr(run)(rows, sizes, *map(jax.typeof, leaves))
    closed = [value for value in jx.constants(program).values() if jnp.ndim(value) and jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
    name = getattr(call.fn, "__qualname__", str(call.fn))
    is_traced = jx.closes_over_tracers(program)
    if closed or is_traced:
        what = "a value of the trace around it" if is_traced else f"an array {list(jnp.shape(closed[0]))}"
        raise ValueError(f"{name} closes over {what}, but it has to run on other devices. Pass its arrays as weights [experts, ...]")
    (result,) = program.out_avals
    if getattr(result, "shape", ())[:1] != (8,) or len(result.shape) != 2:
        raise ValueError(f"{name} returns {list(result.shape)} for 8 rows. It has to return a row [d'] for each row [d]")


def sorted_by_expert(choice: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order of all choices [..., k] by expert [n], the place of each choice in it [n], and the choices of each expert [experts]."""
    flat = choice.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    return order, inverse(order), counts_of(flat, num_experts)


def inverse(order: jax.Array) -> jax.Array:
    """The inverse of a permutation [n]."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def counts_of(flat: jax.Array, num_experts: int) -> jax.Array:
    """The count of each number below `num_experts` in [n]; others do not count."""
    return jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")


def rows_at(x: jax.Array, numbers: jax.Array, places: jax.Array, num_choices: int = 1) -> jax.Array:
    """The rows of x [n, d] that choices [n · k] belong to, by their numbers, a permutation whose inverse is `places`."""

    def taken(x: jax.Array, numbers: jax.Array) -> jax.Array:
        return x[numbers if num_choices == 1 else numbers // num_choices]

    @jax.custom_vjp
    def take(x: jax.Array, numbers: jax.Array, places: jax.Array) -> jax.Array:
        return taken(x, numbers)

    def forward(x: jax.Array, numbers: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        return taken(x, numbers), places

    def backward(places: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
        rows = cotangent[places]
        if num_choices > 1:
            rows = jnp.sum(rows.reshape(-1, num_choices, rows.shape[-1]), axis=1, dtype=jnp.float32).astype(rows.dtype)
        return rows, None, None

    take.defvjp(forward, backward)
    return cast(jax.Array, take(x, numbers, places))


def weighted_sum(results: jax.Array, scale: jax.Array) -> jax.Array:
    """The sum of results [n, k, d], times scale [n, k], in their type."""
    total = jnp.einsum("nkd,nk->nd", results, scale.astype(results.dtype), preferred_element_type=jnp.float32)
    return total.astype(results.dtype)
