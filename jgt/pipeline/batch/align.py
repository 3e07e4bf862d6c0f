"""Which equation of a microbatch's program corresponds to which equation of the whole batch's.

Growth is known for the values of the whole program, but the pipeline runs the program of a microbatch. With one row in a microbatch, JAX
leaves out broadcasts and reshapes of a dim of size 1. So the two lists are compared as texts are (difflib). Equations that only one of them
has must be of the kind that JAX leaves out, and the others must compute the same. Otherwise the model looks at its batch size (`if len(x) >
1`) and would train differently in a microbatch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jgt.pipeline.batch.extent import constant_extent
from jgt.pipeline.batch.growth import AlignmentError, Growth, batch_sizes
from jgt.pipeline.batch.primitives import runs_programs
from jgt.pipeline.batch.rows import SIZE_PARAMS, names
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.jaxpr import Equation
from jgt.program.parts import Flat
from jgt.program.places import Place, place_of, source_of

_SHAPING = names("reshape broadcast_in_dim squeeze expand_dims transpose convert_element_type iota add lt select_n")
"""JAX may leave these out for a dim of size 1: changes of shape, and the arithmetic of indices that count from the end."""


def align_microbatch(whole: Flat, micro: Flat, growth: Growth) -> Mapping[int, int]:
    """The index of an equation in `micro` for each index of an equation in `whole` that has a counterpart.

    whole, micro: the same function traced for the whole batch and for one microbatch. growth: the growth of `whole`. Raises
    AlignmentError if they compute different things; the message says where.
    """
    num_rows = batch_sizes(whole, micro) or (1, 1)
    if num_rows[1] > 1 or num_rows[0] == 1:
        return {i: i for i in range(len(whole.eqns))}
    return _Comparison(num_rows, growth).compare(whole.eqns, micro.eqns, Place())


@dataclass(frozen=True)
class _Comparison:
    num_rows: tuple[int, int]
    growth: Growth

    def compare(self, whole: Sequence[Equation], micro: Sequence[Equation], around: Place) -> Mapping[int, int]:
        a, b = ([_signature(e) for e in eqns] for eqns in (whole, micro))
        # autojunk would ignore equations that are frequent, as a text's common words.
        blocks = difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_matching_blocks()
        pairs = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
        paired_in_micro = set(pairs.values())
        only_whole = [e for i, e in enumerate(whole) if i not in pairs]
        only_micro = [e for i, e in enumerate(micro) if i not in paired_in_micro]
        for equation in only_whole + only_micro:
            if not _is_shaping(equation) and not self._is_excused(equation, around):
                raise self._error(equation, "is in one of them only")
        for i, j in pairs.items():
            if self._is_excused(whole[i], around):
                continue
            self._check_pair(whole[i], micro[j])
            if not runs_programs(whole[i]):
                # The inside of a kernel, or of a call of experts, is cut to its rows: a grid, say, is not a power of the batch size.
                continue
            for p, q in zip(subprograms(whole[i]), subprograms(micro[j]), strict=False):
                self.compare(jx.body(p).eqns, jx.body(q).eqns, place_of(whole[i], around))
        return pairs

    def _is_excused(self, equation: Equation, around: Place) -> bool:
        """Whether an equation may differ: it is under a trusted signal, or its result is never used in a microbatch."""
        return self.growth.trusts(place_of(equation, around)) or any(self.growth.of(v).problem for v in equation.outvars)

    def _check_pair(self, equation: Equation, twin: Equation) -> None:
        for a, b in zip(equation.invars, twin.invars, strict=False):
            if not jx.is_var(a) and not jx.is_var(b) and (problem := constant_extent(a.val, b.val, self.num_rows).problem):
                raise self._error(equation, f"differs: {problem}")
        if _is_shaping(equation):
            return
        for a, b in zip(equation.outvars, twin.outvars, strict=True):
            m, n = math.prod(jx.shape_of(a)), math.prod(jx.shape_of(b))
            # The number of elements either is the same or grows in proportion to the batch.
            if m != n and m * self.num_rows[1] != n * self.num_rows[0]:
                raise self._error(equation, f"makes {m} numbers in one of them and {n} in the other")
        # Where a dim of size 1 is missing, params that name dims differ legitimately. So only numbers are compared, and only
        # if the ranks are the same.
        for key, value in equation.params.items():
            other = twin.params.get(key)
            are_numbers = isinstance(value, int | float) and isinstance(other, int | float) and key not in SIZE_PARAMS
            if are_numbers and repr(value) != repr(other) and _ranks(equation) == _ranks(twin):
                raise self._error(equation, f"has {key}={value} in one of them and {other} in the other")

    def _error(self, equation: Equation, difference: str) -> AlignmentError:
        source = source_of(equation)
        sizes = f"a batch of {self.num_rows[0]} and a microbatch of {self.num_rows[1]} run different programs"
        message = f"{sizes}: {equation.primitive.name} {difference}"
        return AlignmentError(f"{source}: {message}" if source else message)


def _signature(equation: Equation) -> tuple[str, str, int, str]:
    """The features that two equations must share to count as the same: primitive, place, number of results, source line."""
    return equation.primitive.name, place_of(equation, Place()).path, len(equation.outvars), source_of(equation)


def _ranks(equation: Equation) -> list[int]:
    return [len(jx.shape_of(a)) for a in (*equation.invars, *equation.outvars)]


def _is_shaping(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in _SHAPING and (name not in ("add", "select_n", "convert_element_type") or jx.is_integer(equation.outvars[0]))
