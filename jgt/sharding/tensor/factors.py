"""The factors of a program: sets of dims that an axis splits together or not at all.

An example: the hidden units of an MLP are a dim of the first kernel, of its result, of everything computed from that element by element,
and of the second kernel. These dims are one factor. `walk.py` finds them in a program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

DimNumbers = tuple[int, ...]
"""The number of each dim of a value."""


@dataclass(kw_only=True)
class Factors:
    """The factors of a program. Numbers are those of dims until `root` makes them those of factors.

    sizes: the size of each dim. params: the dims of each parameter. values: the dims of all values.
    flops: by dim, the work of matmuls with parameters. sent: by dim, the numbers that devices add up. whole: by dim, why it stays whole.
    """

    sizes: list[int] = field(default_factory=list[int])
    params: list[DimNumbers] = field(default_factory=list[DimNumbers])
    values: set[DimNumbers] = field(default_factory=set[DimNumbers])
    flops: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    whole: dict[int, str] = field(default_factory=dict[int, str])
    _up: list[int] = field(default_factory=list[int])

    def root(self, dim: int) -> int:
        """The factor of a dim."""
        while self._up[dim] != dim:
            self._up[dim] = dim = self._up[self._up[dim]]
        return dim

    def new(self, shape: Sequence[int]) -> DimNumbers:
        """DimNumbers of a value that has nothing to do with others."""
        first = len(self.sizes)
        self.sizes += shape
        self._up += range(first, len(self.sizes))
        return tuple(range(first, len(self.sizes)))

    def join(self, a: int, b: int, *, of_size: bool = True) -> None:
        """Makes two dims one factor. of_size: only if their sizes are equal and not 1."""
        if not of_size or self.sizes[a] == self.sizes[b] != 1:
            self._up[self.root(a)] = self.root(b)

    def keep(self, dims: Iterable[int], why: str) -> None:
        """DimNumbers that cannot be split."""
        for dim in dims:
            self.whole.setdefault(dim, why)
