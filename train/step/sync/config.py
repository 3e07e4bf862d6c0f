"""The `sync:` section. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jgt.document import Bound

from ...settings.numbers import Count, Fraction, Positive

Wire = Literal["f32", "bf16", "int8"]
"""The type in which numbers travel over a slow axis."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """`sync.outer`: the outer step of DiLoCo (arXiv 2311.08105), Nesterov's momentum on the mean change of the parameters.

    lr: the outer learning rate. With 1, and momentum 0, the step is the mean of the parameters.
    momentum: Nesterov's momentum; below 1. [Long runs](sync.md#losses), with many exchanges, take more, and a lower `lr`: the paper has 0.7
    and 0.9.
    """

    lr: Positive = 1.0
    momentum: Fraction = 0.5

    def problems(self) -> Iterator[tuple[str, str]]:
        """Momentum that never fades."""
        if self.momentum == 1:
            yield "momentum", "1 never forgets a change. Use less, such as 0.9"


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """The `sync:` section: how often the devices along an axis of the mesh agree, and what they send.

    axis: an axis of the mesh that splits the batch as its outermost axis, and no parameter.
    every: 1: gradients are added up in each step. More: each group trains for itself for so many steps, then they exchange parameters. At
    most `train.steps`.
    outer: with `every` above 1, the step that an exchange takes. null: the mean of the parameters (local SGD, arXiv 1805.09767).
    wire: the type in which numbers cross the axis. int8: in blocks of 256 with a scale each.
    late: with `every: 1`: 1 adds up the gradients of a step during the next one, which [applies them](sync.md#one-step-late).
    fragments: with `every` above 1: the parameters are exchanged in so many [parts](sync.md#fragments), one after another in a phase
    (arXiv 2501.18512).
    """

    axis: str
    every: Count = 1
    outer: OuterConfig | None = None
    wire: Wire = "f32"
    late: Annotated[int, Bound(low=0, high=1)] = 0
    fragments: Annotated[int, Bound(low=1, high=10_000)] = 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that belong to another kind of exchange."""
        if self.outer is not None and self.every == 1:
            yield "outer", "is a step on parameters, but every: 1 exchanges gradients. Raise every, or remove the key"
        if self.late and self.every > 1:
            yield "late", f"is about gradients, but every: {self.every} exchanges parameters. Remove the key, or use every: 1"
        if self.fragments > 1 and self.every == 1:
            yield "fragments", "is about exchanges of parameters, but every: 1 exchanges gradients. Raise every, or remove the key"
        elif self.fragments > self.every:
            fits = f"Use at most {self.every}"
            yield "fragments", f"{self.fragments} do not fit into a phase of {self.every} steps, with a step for each. {fits}"
