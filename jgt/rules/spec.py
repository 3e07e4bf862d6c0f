"""Specs: which mesh axes shard which dim of a tensor.

A spec is written for the dims that the model uses, and fits tensors with exactly that many dims. `SpecRule.dims` turns it into
the axes of each dim of one tensor; from then on there is no `...`. `misfits` compares these with the tensor's shape. A dim whose
size the axes do not divide is an error, with the sizes that would fit: XLA would pad it and move padding between devices in every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, cast

from jgt.document.bind import ReadBy
from jgt.document.node import Node
from jgt.rules.axes import SPEC_SCHEMA, AxisGroups, Spec, read_spec


@dataclass(frozen=True, kw_only=True)
class SpecRule:
    """A pattern, and the spec of everything that it matches. `where` is its file:line, which does not count when rules are compared."""

    NAME, VALUE = "pattern", "spec"
    pattern: str = "**"
    spec: Spec
    where: str = field(default="rules", compare=False)

    @property
    def rank(self) -> int:
        """The number of dims that the spec names, which is the smallest rank of a tensor that it fits."""
        return len(self.spec) - self.spec.count(...)

    @property
    def axes(self) -> list[str]:
        """Every axis that the spec names."""
        return [axis for entry in self.spec if entry is not ... for axis in entry]

    def tree(self) -> list[object]:
        """The spec as a rules file has it."""
        return ["..." if axes is ... else None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in self.spec]

    def fits(self, rank: int) -> bool:
        """Whether the spec can lay out a tensor of this rank: with `...` any larger rank will do."""
        return rank >= self.rank if ... in self.spec else rank == self.rank

    def dims(self, rank: int, skip: Collection[int] = ()) -> tuple[tuple[str, ...], ...]:
        """The axes of each of `rank` dims. The dims in `skip` have no entry in the spec and are not sharded.

        The dims of (("data",), ...) at rank 3 are (("data",), (), ()). Raises ValueError if the spec names more dims than there are.
        """
        # The number of dims that `...` stands for, or that a spec without it leaves unnamed.
        room = rank - len(skip) - self.rank
        if room < 0:
            raise ValueError(f"the spec has {self.rank} dims, the tensor {rank - len(skip)}")
        entries = iter([axes for entry in self.spec for axes in ([()] * room if entry is ... else [entry])])
        # The entries may end early: an input may have more dims than the spec, and those are not sharded.
        return tuple(() if dim in skip else next(entries, ()) for dim in range(rank))

    def misfit_problems(
        self, dims: Sequence[tuple[str, ...]], shape: tuple[int, ...], mesh: Mapping[str, int], what: str, *, label: str = ""
    ) -> dict[int, str]:
        """A problem for each dim of `shape` that its axes do not divide, by dim. label: replaces a pattern that would say nothing.

        `file:line: pattern: dim 1 of ... has size 6, which tensor=4 does not divide. ...`
        """
        problems: dict[int, str] = {}
        for misfit in misfits(dims, shape, mesh):
            size, sizes = misfit.size, ", ".join(map(str, shape))
            axes = " x ".join(f"{axis}={mesh[axis]}" for axis in misfit.axes) + (f" (= {misfit.parts})" if len(misfit.axes) > 1 else "")
            text = f"{self.where}: {label or self.pattern}: dim {misfit.dim} of the {what} [{sizes}]"
            # The size of a dim of jax.export's symbolic shapes is an expression.
            if isinstance(cast(object, size), int):
                problems[misfit.dim] = f"{text} has size {size}, which {axes} does not divide. {misfit.remedy}"
            else:
                needed = repr(f"mod({size}, {misfit.parts}) == 0")
                text = f"{text} has the symbolic size {size}, and nothing says that {axes} divides it"
                problems[misfit.dim] = f"{text}. Add the constraint {needed} to the symbolic shape"
        return problems


@dataclass(frozen=True)
class Misfit:
    """A dim of a tensor whose size its axes do not divide: `parts` is the product of their sizes. Axes of size 1 are left out."""

    dim: int
    size: int
    axes: tuple[str, ...]
    parts: int

    @property
    def remedy(self) -> str:
        """The nearest sizes of the dim that would fit, and the products of axis sizes that divide it."""
        below = self.size - self.size % self.parts
        sizes = f"{below} or {below + self.parts}" if below else f"{self.parts}"
        # Divisors come in pairs around the square root, so that a vocabulary of millions takes a thousand steps.
        low = [n for n in range(1, math.isqrt(self.size) + 1) if self.size % n == 0]
        divisors = ", ".join(str(n) for n in sorted({*low, *(self.size // n for n in low)}) if n < self.parts)
        return f"A size of {sizes} would fit, or {' x '.join(self.axes)} of {divisors}"


def misfits(dims: Sequence[tuple[str, ...]], shape: tuple[int, ...], mesh: Mapping[str, int]) -> Iterator[Misfit]:
    """The dims of `shape` that their axes do not divide on a mesh of these sizes. An axis that the mesh does not have counts as 1."""
    for dim, (axes, size) in enumerate(zip(dims, shape, strict=True)):
        # `Rules.axis_problems` reports a missing axis, so it must not cause a misfit as well.
        parts = math.prod(mesh.get(axis, 1) for axis in axes)
        if size % parts:
            yield Misfit(dim, size, tuple(axis for axis in axes if mesh.get(axis, 1) > 1), parts)


def _read_out(node: Node, problems: list[str], groups: AxisGroups) -> SpecRule:
    return SpecRule(spec=read_spec(node, problems, groups), where=node.where)


OutSpec = Annotated[SpecRule | None, ReadBy(_read_out, SPEC_SCHEMA)]
"""The spec of what leaves a signal. A null is not a spec: it could mean no rule as well as no axis."""
