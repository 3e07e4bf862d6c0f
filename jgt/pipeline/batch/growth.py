"""The result of the proof: how each value of a program grows with the batch, and which values are fed back into rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.typing import ArrayLike

from jgt.pipeline.batch.extent import INDEPENDENT, Extent, constant_extent
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.program.parts import Flat
from jgt.program.places import Place


class AlignmentError(Exception):
    """Two traces of a function, at different batch sizes, do not have the same equations; the message says where."""


@dataclass(frozen=True)
class Feed:
    """A statistic of the batch: a number of the whole batch that is combined with rows again, or decides what becomes of them.

    A microbatch cannot compute it. It has to be known before the microbatches run, which is possible if it depends on inputs
    only. `equation` uses `var`; `source` is its file:line.
    """

    var: Var
    equation: Equation
    source: str


@dataclass(kw_only=True)
class Growth:
    """The extents of a program's values, and what is fed back into rows.

    num_rows: the batch sizes of the two traces. trusted: signals under which values are meant to be computed from the rows at hand, in
    addition to regions that the model marks with `per_microbatch`. Nothing is refused there: a plain sum is a sum, and everything else is
    averaged.
    """

    num_rows: tuple[int, int]
    trusted: tuple[str, ...] = ()
    extents: dict[Var, Extent] = field(default_factory=dict[Var, Extent])
    feeds: list[Feed] = field(default_factory=list[Feed])

    def of(self, atom: Atom, twin: Atom | None = None) -> Extent:
        """The extent of a variable or literal. A variable that no equation computed from the batch is independent of it.

        twin: the same operand at the other batch size; two literals are compared.
        """
        if jx.is_var(atom):
            return self.extents.get(atom, INDEPENDENT)
        # Without a twin a literal counts as the same at every batch size.
        twin_value = atom.val if twin is None or jx.is_var(twin) else twin.val
        return constant_extent(atom.val, twin_value, self.num_rows)

    def trusts(self, place: Place) -> bool:
        """Whether a place is under one of the trusted signals, or in a region of `signal.per_microbatch`."""
        return place.of_microbatch or any(place.inside(tuple(signal.split("/"))) for signal in self.trusted)

    def add_constants(self, constants: Mapping[Var, ArrayLike], twins: Mapping[Var, ArrayLike]) -> None:
        """Adds the extents of the arrays that two traces close over. Raises AlignmentError if they have different numbers of them."""
        if len(constants) != len(twins):
            raise AlignmentError(f"it contains {len(constants)} arrays at one batch size and {len(twins)} at another")
        for (var, value), twin in zip(constants.items(), twins.values(), strict=True):
            self.extents[var] = constant_extent(value, twin, self.num_rows)


def batch_sizes(program: Flat, twin: Flat) -> tuple[int, int] | None:
    """The number of rows of the batch in two traces: dim 0 of the first input whose shape differs; None if there is none."""
    shapes = ((jx.shape_of(a), jx.shape_of(b)) for a, b in zip(program.invars, twin.invars, strict=True))
    # The first input that differs speaks for all, because inputs with rows have the same number of them.
    return next(((a[0], b[0]) for a, b in shapes if a != b), None)
