"""The trial of a function of experts: whether it maps each row on its own.

A function that takes a maximum over rows, say, would give a device other numbers than the whole batch, because a device has other rows. No
type shows that. So the function runs on a few rows of two experts, and then on the same rows as devices may have them: each expert's in
another order, and some of them without the others, each time with other noise behind the last group. Every row has to have the same result
every time. Parts are needed besides the order, because a mean over the rows of an expert does not depend on it.

Two experts of a published model can take a gigabyte. How wide rows are changes nothing about which rows a result depends on, as long as the
program is the same. So the function is traced at its own widths and at small ones, and if the two programs differ in these widths alone,
the small one runs. If they differ in anything else, or the function cannot be traced with small widths, it runs at its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation, Program
from jgt.program.tracing import evaluate, trace
from jgt.replacements.experts.call import ExpertCall

_ALL = ((0, 1, 2, 3, 4), (5, 6, 7))
"""The numbers of the rows of each expert."""
_AGAIN = (((3, 4, 0, 1, 2), (7, 6, 5)), ((1, 0), (6,)), ((4, 2, 3), (5, 7)))
"""The rows in another order, and two parts of them."""
_NUM_ROWS = 12
"""With those that belong to no expert."""
_NARROW = 64
"""Widths up to here stay as they are."""


def is_row_wise(call: ExpertCall, equation: Equation) -> bool:
    """Whether the function of a call, whose equation this is, gives each row the same result whatever rows there are beside it."""
    # A new thread has no trace around it, so operations there run.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, call, equation).result()


@dataclass(frozen=True, kw_only=True)
class _Sized:
    """The function at some widths. leaves: its weights [experts of the trial, ...]. rows: [rows, d]."""

    leaves: Sequence[jax.ShapeDtypeStruct]
    rows: jax.ShapeDtypeStruct
    program: Program

    @classmethod
    def of(cls, call: ExpertCall, leaves: Sequence[jax.ShapeDtypeStruct], rows: jax.ShapeDtypeStruct) -> _Sized:
        def run(rows: jax.Array, sizes: jax.Array, *leaves: jax.Array) -> jax.Array:
            return call.run(leaves, rows, sizes)

        sizes = jax.ShapeDtypeStruct(leaves[0].shape[:1], jnp.int32)
        return cls(leaves=leaves, rows=rows, program=trace(run, rows, sizes, *leaves)[0])

    def narrow(self, call: ExpertCall) -> _Sized:
        """The function at small widths; at its own if it may be another function there."""
        widths = {size for one in (self.rows, *self.leaves) for size in one.shape[1:]}
        free = (size for size in range(32, _NARROW + 8 * len(widths), 8) if size not in {*widths, _NUM_ROWS})
        small = dict(zip(sorted(width for width in widths if width > _NARROW), free, strict=False))

        def narrowed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0], *(small.get(size, size) for size in x.shape[1:])), x.dtype)

        try:
            there = _Sized.of(call, [narrowed(leaf) for leaf in self.leaves], narrowed(self.rows))
        # Any exception: here the user's function runs at widths that its author may not have thought of.
        except Exception:
            return self
        # The text of a program does not have the numbers in its arrays.
        has_arrays = any(np.ndim(value) for value in jx.constants(self.program).values())
        return self if has_arrays or _text(self.program, small) != _text(there.program, {}) else there


def _text(program: Program, sizes: Mapping[int, int]) -> str:
    """A program with all its parts as text, with other numbers in the place of some."""
    resized = re.sub(r"\d+", lambda number: str(sizes.get(int(number[0]), number[0])), str(program))
    # Where lines break depends on the length of numbers.
    return re.sub(r" at 0x[0-9a-f]+|\s", "", resized)


def _try(call: ExpertCall, equation: Equation) -> bool:
    leaves, x = [jx.struct_of(atom) for atom in equation.invars[:-3]], jx.struct_of(equation.invars[-3])
    count = min(len(_ALL), leaves[0].shape[0])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        few = [jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        sized = _Sized.of(call, few, jax.ShapeDtypeStruct((_NUM_ROWS, x.shape[-1]), x.dtype)).narrow(call)
        weights, rows = [_noise(leaf) for leaf in sized.leaves], _noise(sized.rows)
        function = cast("Callable[[Sequence[np.ndarray]], list[jax.Array]]", jax.jit(partial(evaluate, sized.program)))

        def run(numbers: Sequence[Sequence[int]], factor: int, weights: Sequence[np.ndarray] = weights) -> tuple[np.ndarray, list[int]]:
            sizes, own = [len(of) for of in numbers[:count]], [number for of in numbers[:count] for number in of]
            order = [*own, *(number for number in range(_NUM_ROWS) if number not in own)]
            given = rows[order]
            given[len(own) :] *= factor
            results = function([given, np.array(sizes, np.int32), *weights])
            return np.asarray(results[0], np.float32)[: len(own)], own

        whole, _ = run(_ALL, 1)
        again = [run(numbers, 7) for numbers in _AGAIN]
        if count > 1:
            # A device numbers its own experts from 0, so the first of all must not be a special one.
            again.append(run(_ALL[::-1], 1, [w[::-1] for w in weights]))
    tolerance = 1e-5 if x.dtype == jnp.float32 else 2e-2
    atol = tolerance * float(np.max(np.abs(whole)))
    return all(np.allclose(whole[own], results, rtol=tolerance, atol=atol) for results, own in again)


def _noise(like: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
    # Weights may be large, and random numbers for all of them would take seconds. A prime length makes rows differ.
    numbers = np.random.default_rng(math.prod(like.shape)).standard_normal(4099, np.float32) / math.sqrt(like.shape[-1])
    # Rounded before it is repeated: a copy costs less than a conversion.
    return np.resize(numbers.astype(like.dtype), like.shape)
