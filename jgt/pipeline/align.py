"""Which equation of the micro program is which of the whole one.

They are the same, one by one, unless a microbatch is one row: dims of size 1 need fewer broadcasts. What is left out then
must be of that kind, and the rest must compute the same: a model may look at its batch size (`if len(x) > 1`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place
from jgt.pipeline.extent import of_constant
from jgt.pipeline.growth import Growth
from jgt.pipeline.rows import names, shape_of

_SHAPING = names("reshape broadcast_in_dim squeeze expand_dims transpose convert_element_type iota add lt select_n")
"""What JAX may leave out for a dim of size 1: changes of shape, and of indices from the end to such from the start."""


class AlignmentError(Exception):
    """The two programs compute different things; the message says where."""


def alignment(full: Sequence[Equation], micro: Sequence[Equation], num_rows: tuple[int, int], growth: Growth) -> Mapping[int, int]:
    """The index in `micro` for each index in `full` that has one; num_rows: of the batch in each. Raises AlignmentError.

    growth: of `full`. With more than one row in each it has compared the two already.
    """
    if num_rows[1] > 1 or num_rows[0] == 1:
        return {i: i for i in range(len(full))}
    return _Comparison(num_rows, growth).compare(full, micro, Place())


@dataclass(frozen=True)
class _Comparison:
    num_rows: tuple[int, int]
    growth: Growth

    def compare(self, full: Sequence[Equation], micro: Sequence[Equation], around: Place) -> Mapping[int, int]:
        a, b = ([_signature(e) for e in eqns] for eqns in (full, micro))
        blocks = difflib.SequenceMatcher(a=a, b=b, autojunk=False).get_matching_blocks()
        found = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
        taken = set(found.values())
        for equation in [e for i, e in enumerate(full) if i not in found] + [e for i, e in enumerate(micro) if i not in taken]:
            if not _is_shaping(equation) and not self._is_known(equation, around):
                raise self._error(equation, "is there for the one, but not for the other")
        for i, j in found.items():
            if self._is_known(full[i], around):
                continue
            self._one(full[i], micro[j])
            for p, q in zip(jx.subprograms(full[i]), jx.subprograms(micro[j]), strict=False):
                self.compare(jx.body(p).eqns, jx.body(q).eqns, jx.place_of(full[i], around))
        return found

    def _is_known(self, equation: Equation, around: Place) -> bool:
        """Whether it is taken as it is, or not taken into a microbatch at all."""
        return self.growth.trusts(jx.place_of(equation, around)) or any(self.growth.of(v).problem for v in equation.outvars)

    def _one(self, equation: Equation, twin: Equation) -> None:
        for a, b in zip(equation.invars, twin.invars, strict=False):
            if not jx.is_var(a) and not jx.is_var(b) and (problem := of_constant(a.val, b.val, self.num_rows).problem):
                raise self._error(equation, f"differs: {problem}")
        if _is_shaping(equation):
            return
        for a, b in zip(equation.outvars, twin.outvars, strict=True):
            m, n = math.prod(shape_of(a)), math.prod(shape_of(b))
            if m != n and m * self.num_rows[1] != n * self.num_rows[0]:
                raise self._error(equation, f"makes {m} numbers for the one, {n} for the other")
        # Dims move where one of size 1 is gone: only what else is a number can be compared.
        for key, value in equation.params.items():
            other = twin.params.get(key)
            if isinstance(value, int | float) and isinstance(other, int | float) and repr(value) != repr(other) and _ranks(equation) == _ranks(twin):
                raise self._error(equation, f"has {key}={value} for the one, {other} for the other")

    def _error(self, equation: Equation, what: str) -> AlignmentError:
        source = jx.source_of(equation)
        sizes = f"a batch of {self.num_rows[0]} and a microbatch of {self.num_rows[1]} run different programs"
        return AlignmentError(f"{source}: {sizes}: {equation.primitive.name} {what}" if source else f"{sizes}: {equation.primitive.name} {what}")


def _signature(equation: Equation) -> tuple[str, str, int, str]:
    return equation.primitive.name, jx.place_of(equation, Place()).path, len(equation.outvars), jx.source_of(equation)


def _ranks(equation: Equation) -> list[int]:
    return [len(shape_of(a)) for a in (*equation.invars, *equation.outvars)]


def _is_shaping(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in _SHAPING and (name not in ("add", "select_n", "convert_element_type") or jx.is_integer(equation.outvars[0]))
