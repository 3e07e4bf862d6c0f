# pyright: basic
"""Finds the factors of a program, and what it costs to split each.

One walk joins the dims that each equation ties, and notes

- the matmuls whose work is divided if a factor is split,
- what is then added up over devices: the results of matmuls that sum over it, and the cotangents of what is multiplied by a kernel that
  has it (in the backward pass, that matmul sums over it),
- why it cannot be split: something moves along it, or a value would have it twice.

Where a dim is merged with others or divided, its major part stays the same factor, and the rest cannot be split. An equation that this file
does not know leaves the dims of its operands whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jgt.program import jaxpr as jx
from jgt.program.dataflow import ELEMENTWISE
from jgt.program.dims import reshape_runs
from jgt.program.equations import is_scan, outer_operands, outer_results, scan_sizes, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.kernels import kernel_of
from jgt.program.places import is_manual, line_of
from jgt.sharding.tensor.factors import DimNumbers, Factors

_SAME = ELEMENTWISE | {"name", "optimization_barrier"}
_REDUCE = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
_ALONG = ("axis", "dimension", "dimensions")
"""The params that name the dims along which an equation moves numbers."""
_BY_SIZE = ("slice", "dynamic_slice", "dynamic_update_slice", "pad", "top_k")
"""Primitives that move numbers along the dims whose size they change, and along no other."""


@dataclass(frozen=True)
class _Value:
    """The dims of a value, and whether it is made of parameters alone."""

    dims: DimNumbers
    is_weight: bool = False


def factors_of(program: Program, num_parameters: int) -> Factors:
    """The factors of a program whose first arguments are parameters."""
    walk = _Walk()
    factors, inner = walk.factors, jx.body(program)
    values = [_Value(factors.new(jx.shape_of(v)), n < num_parameters) for n, v in enumerate(inner.invars)]
    factors.params = [value.dims for value in values[:num_parameters]]
    walk.run(program, values, 1)
    return factors


class _Walk:
    """A walk through a program, whose inner programs are walked once for each call."""

    def __init__(self) -> None:
        self.factors = Factors()
        # What was counted already: three kernels that read one value add up its cotangents first.
        self._counted = set[tuple[int, DimNumbers]]()

    def run(self, program: Program, arguments: Sequence[_Value], times: int) -> list[_Value]:
        """The values that a program returns."""
        inner = jx.body(program)
        known: dict[Var, _Value] = dict(zip(inner.invars, arguments, strict=True))

        def of(atom: Atom) -> _Value:
            if not jx.is_var(atom):
                return _Value(self.factors.new(jx.shape_of(atom)), True)
            return known.setdefault(atom, _Value(self.factors.new(jx.shape_of(atom))))

        for equation in inner.eqns:
            operands = [of(a) for a in equation.invars]
            arrays = [one for one in operands if one.dims]
            is_weight = bool(arrays) and all(one.is_weight for one in arrays)
            results = [_Value(self.factors.new(jx.shape_of(v)), is_weight) for v in equation.outvars]
            self._equation(equation, operands, results, times)
            known |= dict(zip(equation.outvars, results, strict=True))
            self.factors.values |= {one.dims for one in (*operands, *results)}
        return [of(a) for a in inner.outvars]

    def _equation(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        kernel = kernel_of(equation.primitive.name)
        if any(True for _ in subprograms(equation)):
            self._programs(equation, operands, results, times)
        elif kernel is not None and kernel.heads is not None:
            self._attention(equation, operands, results[0].dims, kernel.heads(equation.params))
        elif any(one.dims for one in operands):
            read = _READERS.get(equation.primitive.name, _Walk._other)
            read(self, equation, operands, results, times)

    def _elementwise(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        self._same([one.dims for one in (*operands, *results)], range(len(results[0].dims)))

    def _broadcast(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        self._pairs(operands[0].dims, [results[0].dims[d] for d in equation.params["broadcast_dimensions"]])

    def _transpose(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        self._pairs([operands[0].dims[d] for d in equation.params["permutation"]], results[0].dims)

    def _squeeze(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        self._pairs([dim for d, dim in enumerate(operands[0].dims) if d not in equation.params["dimensions"]], results[0].dims)

    def _reduce(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        dims, axes = operands[0].dims, equation.params["axes"]
        self._pairs([dim for d, dim in enumerate(dims) if d not in axes], results[0].dims)
        self._sum([dims[d] for d in axes], operands, results[0].dims, times)

    def _pairs(self, before: Sequence[int], after: Sequence[int]) -> None:
        for a, b in zip(before, after, strict=True):
            self.factors.join(a, b)

    def _same(self, values: Sequence[DimNumbers], positions: Iterable[int]) -> None:
        """Joins values of one rank along some dims; scalars have none."""
        arrays = [dims for dims in values if dims]
        for position in positions:
            for dims in arrays[1:]:
                self.factors.join(arrays[0][position], dims[position])

    def _sum(self, dims: Iterable[int], operands: Sequence[_Value], result: DimNumbers, times: int) -> None:
        """Notes that devices add up a result of activations if these dims are split."""
        if not all(one.is_weight for one in operands):
            for dim in dims:
                self.factors.sent[dim] += times * self._count(result)

    def _count(self, dims: DimNumbers) -> int:
        return math.prod(self.factors.sizes[dim] for dim in dims)

    def _dot(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        result = results[0]
        (summed, batch) = equation.params["dimension_numbers"]
        left, right = operands
        pairs = [[(left.dims[a], right.dims[b]) for a, b in zip(*of, strict=True)] for of in (summed, batch)]
        free = [[dim for d, dim in enumerate(one.dims) if d not in (*summed[n], *batch[n])] for n, one in enumerate(operands)]
        for a, b in (*pairs[0], *pairs[1]):
            self.factors.join(a, b)
        self._pairs([*(a for a, _ in pairs[1]), *free[0], *free[1]], result.dims)
        self._product(equation, operands, free, [a for a, _ in pairs[0]], result, times)

    def _product(
        self, equation: Equation, operands: list[_Value], free: list[list[int]], summed: list[int], result: _Value, times: int
    ) -> None:
        """Notes the work and the sums of a matmul. free: the dims of each operand that the result has."""
        kinds = [one.is_weight for one in operands]
        self._sum(summed, operands, result.dims, times)
        if not any(kinds):
            self.factors.keep(summed, f"{_line(equation)} sums over it between two activations")
        if sum(kinds) != 1:
            return
        weight = kinds.index(True)
        other = operands[1 - weight].dims
        for dim in {*result.dims, *summed}:
            self.factors.flops[dim] += 2.0 * times * self._count(result.dims) * self._count(tuple(summed))
        for dim in free[weight]:
            if (self.factors.root(dim), other) not in self._counted:
                self._counted.add((self.factors.root(dim), other))
                self.factors.sent[dim] += times * self._count(other)

    def _convolution(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        result = results[0]
        numbers, groups = (
            equation.params["dimension_numbers"],
            equation.params["feature_group_count"] * equation.params["batch_group_count"],
        )
        (rows, features, *moving), (out, inner, *_), (rows_out, features_out, *_) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        image, kernel = (one.dims for one in operands)
        self.factors.join(image[rows], result.dims[rows_out])
        self._moved(equation, [image[d] for d in moving])
        if groups > 1:
            self._moved(equation, [image[features], kernel[out], result.dims[features_out]])
            return
        self.factors.join(image[features], kernel[inner])
        self.factors.join(kernel[out], result.dims[features_out])
        self._product(equation, operands, [[image[rows]], [kernel[out]]], [image[features]], result, times)

    def _reshape(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        old, new, sizes = operands[0].dims, results[0].dims, self.factors.sizes
        for before, after in reshape_runs([sizes[d] for d in old], [sizes[d] for d in new]):
            wide = [[dims[d] for d in run if sizes[dims[d]] != 1] for dims, run in ((old, before), (new, after))]
            if all(wide):
                self.factors.join(wide[0][0], wide[1][0], of_size=False)
                self.factors.keep([*wide[0][1:], *wide[1][1:]], f"{_line(equation)} reshapes it")

    def _gather(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        """A lookup sums over the dims that indices choose from, as each device finds the rows that it has."""
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        (table, indices), result = (one.dims for one in operands), results[0]
        alone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        for d, out in zip([d for d in range(len(table)) if d not in alone], numbers.offset_dims, strict=True):
            if sizes[d] == self.factors.sizes[table[d]]:
                self.factors.join(table[d], result.dims[out])
            else:
                self._moved(equation, [table[d]])
        rows = [dim for d, dim in enumerate(result.dims) if d not in numbers.offset_dims]
        self._pairs(indices[:-1], rows)
        for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            self.factors.join(table[d], indices[i])
        for d in numbers.collapsed_slice_dims:
            self.factors.sent[table[d]] += times * self._count(result.dims)
            if operands[0].is_weight:
                # As the matmul with one-hot rows that it stands for.
                self.factors.flops[table[d]] += 2.0 * times * self._count((*result.dims, table[d]))

    def _attention(self, equation: Equation, operands: list[_Value], out: DimNumbers, heads: int) -> None:
        """An attention computes each row and each head on its own. Several heads of queries may have one of keys."""
        arrays = [*(one.dims for one in operands[:3]), out]
        for dims in arrays[1:]:
            self.factors.join(arrays[0][0], dims[0])
            self.factors.join(arrays[0][heads], dims[heads], of_size=False)
        whole = [dim for dims in arrays for d, dim in enumerate(dims) if d not in (0, heads)]
        self._moved(equation, [*whole, *(dim for one in operands[3:] for dim in one.dims)])

    def _other(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        """An equation of arrays of one rank: dims whose sizes stay are the same dims, but not those along which it moves numbers."""
        rank = len(results[0].dims) if results else 0
        named = [equation.params[key] for key in _ALONG if equation.params.get(key) is not None]
        arrays = [one.dims for one in (*operands, *results) if len(one.dims) == rank]
        if not (named or equation.primitive.name in _BY_SIZE) or any(len(one.dims) != rank for one in (*operands[:1], *results)):
            self._whole(operands, f"{_line(equation)} is not understood ({equation.primitive.name})")
            return
        moved = {d for one in named for d in (one if isinstance(one, tuple) else (one,))}
        moved |= {d for d in range(rank) if len({self.factors.sizes[dims[d]] for dims in arrays}) > 1}
        self._moved(equation, [dims[d] for dims in arrays for d in moved])
        self._same(arrays, [d for d in range(rank) if d not in moved])

    def _moved(self, equation: Equation, dims: Iterable[int]) -> None:
        self.factors.keep(dims, f"{_line(equation)} moves along it ({equation.primitive.name})")

    def _whole(self, operands: Iterable[_Value], why: str) -> None:
        self.factors.keep([dim for one in operands for dim in one.dims], why)

    def _programs(self, equation: Equation, operands: list[_Value], results: list[_Value], times: int) -> None:
        inside = times * (equation.params["length"] if is_scan(equation) else 1)
        by_var: dict[Any, _Value] = {a: one for a, one in zip(equation.invars, operands, strict=True) if jx.is_var(a)}
        for program in subprograms(equation):
            atoms, inner = outer_operands(equation, program), jx.body(program)
            if is_manual(equation) or any(a is None for a in atoms):
                self._whole(operands, f"{_line(equation)} is not understood ({equation.primitive.name})")
                return
            outer = [by_var[a] if jx.is_var(a) else _Value(self.factors.new(jx.shape_of(a)), True) for a in atoms if a is not None]
            arguments = [self._sliced(equation, one, jx.shape_of(v)) for one, v in zip(outer, inner.invars, strict=True)]
            returned = self.run(program, arguments, inside)
            ends = zip(outer_results(equation, program), results, returned, strict=False)
            for one, inner_one in ((one, inner_one) for out, one, inner_one in ends if out is not None):
                self._pairs(one.dims[len(one.dims) - len(inner_one.dims) :], inner_one.dims)
            self._carry(equation, arguments, returned)

    def _sliced(self, equation: Equation, value: _Value, shape: Sequence[int]) -> _Value:
        """A value as an argument of a program, without the dim over which a scan goes."""
        gone = len(value.dims) - len(shape)
        self._moved(equation, value.dims[:gone])
        return _Value(value.dims[gone:], value.is_weight)

    def _carry(self, equation: Equation, arguments: list[_Value], returned: list[_Value]) -> None:
        """The dims of what a loop carries are the same in each step."""
        if is_scan(equation):
            first, count = scan_sizes(equation)
        elif "body_jaxpr" in equation.params and len(returned) == len(equation.outvars):
            first, count = len(arguments) - len(returned), len(returned)
        else:
            return
        for one, other in zip(arguments[first : first + count], returned, strict=False):
            self._pairs(one.dims, other.dims)


def _line(equation: Equation) -> str:
    return line_of(equation) or "a library"


_READERS = {
    **dict.fromkeys(_SAME, _Walk._elementwise),
    **dict.fromkeys(_REDUCE, _Walk._reduce),
    "dot_general": _Walk._dot,
    "conv_general_dilated": _Walk._convolution,
    "broadcast_in_dim": _Walk._broadcast,
    "reshape": _Walk._reshape,
    "transpose": _Walk._transpose,
    "squeeze": _Walk._squeeze,
    "gather": _Walk._gather,
}
"""The primitives of which more is known than that they keep the dims whose sizes stay."""
