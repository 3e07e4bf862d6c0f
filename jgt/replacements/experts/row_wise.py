"""The trial that shows whether a function of experts maps each row on its own.

A function that takes a maximum over rows, say, would give a device other numbers than the whole batch, because a device has other rows.
No type shows that. So the function runs once on a few rows of two experts, and again with the rows of each expert in another order and with
other noise behind the last group: the results have to be the same, in that order.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation
from jgt.replacements.experts.call import ExpertCall

_SIZES = (5, 3)
"""The rows of each expert in the trial; some more belong to none."""
_NUM_ROWS = 12


def is_row_wise(call: ExpertCall, equation: Equation) -> bool:
    """Whether the function of a call, whose equation this is, gives each row the same result whatever rows there are beside it."""
    # A new thread has no trace around it, so operations there run.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, call, equation).result()


def _try(call: ExpertCall, equation: Equation) -> bool:
    leaves, x = [jx.struct_of(atom) for atom in equation.invars[:-3]], jx.struct_of(equation.invars[-3])
    count = min(len(_SIZES), leaves[0].shape[0])
    sizes, num = jnp.array(_SIZES[:count], jnp.int32), sum(_SIZES[:count])
    order = np.arange(_NUM_ROWS)
    order[: _SIZES[0]] = np.roll(order[: _SIZES[0]], 2)
    order[_SIZES[0] : num] = order[_SIZES[0] : num][::-1]

    def run(rows: jax.Array) -> np.ndarray[Any, Any]:
        return np.asarray(call.run(weights, rows, sizes), np.float32)[:num]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        weights = [_noise((count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        rows = _noise((_NUM_ROWS, x.shape[-1]), x.dtype)
        once, again = run(rows), run(rows[order].at[num:].multiply(7))
    tolerance = 1e-5 if x.dtype == jnp.float32 else 2e-2
    return np.allclose(once[order[:num]], again, rtol=tolerance, atol=tolerance * float(np.max(np.abs(once))))


def _noise(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Weights may be large, and random numbers for all of them would take seconds. A prime length makes rows differ.
    numbers = np.random.default_rng(math.prod(shape)).standard_normal(4099, np.float32) / math.sqrt(shape[-1])
    return jnp.asarray(np.resize(numbers, shape), dtype)
