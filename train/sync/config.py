"""The `sync:` section. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jgt.document import Bound

from ..sections import Count, Fraction, Natural, Positive


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """`sync.outer`: the outer step of DiLoCo (arXiv 2311.08105), Nesterov's momentum on the mean change of the parameters.

    lr: the outer learning rate. With 1, and momentum 0, the step is the mean of the parameters.
    momentum: below 1. Long runs, with many exchanges, take more, and a lower lr: the paper has 0.7 and 0.9.
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

    axis: an axis that splits the batch and no parameter, the outermost of those of the batch.
    every: 1 adds up gradients in each step. More: the groups of devices train for themselves, and exchange parameters every so many steps.
    outer: with every above 1, the step that the exchange takes. null: the mean of the parameters (local SGD, arXiv 1805.09767).
    wire: the type in which numbers travel over the axis. int8: in blocks of 256 with one scale each.
    late: with every 1, the gradients of a step are added up beside the next one, and applied there: 0 or 1 steps late.
    fragments: with every above 1, the parameters are exchanged in so many parts, one after another in a phase (arXiv 2501.18512).
    overlap: with every above 1, the steps between an exchange and its use.
    blend: with overlap, how much a replica's own parameters count when it takes over what was exchanged. null: 0.5.
    feedback: with every 1 and int8, what rounding took away from a gradient is added to the next one.
    """

    axis: str
    every: Count = 1
    outer: OuterConfig | None = None
    wire: Literal["f32", "bf16", "int8"] = "f32"
    feedback: bool = False
    late: Annotated[int, Bound(low=0, high=1)] = 0
    fragments: Annotated[int, Bound(low=1, high=10_000)] = 1
    overlap: Natural = 0
    blend: Fraction | None = None

    @property
    def kept(self) -> float:
        """How much a replica's own parameters count when it takes over what was exchanged."""
        return 0.5 if self.blend is None else self.blend

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that belong to another kind of exchange."""
        if self.outer is not None and self.every == 1:
            yield "outer", "is a step on parameters, but every: 1 exchanges gradients. Raise every, or remove the key"
        yield from self._fragment_problems()
        if self.late and self.every > 1:
            yield "late", f"is about gradients, but every: {self.every} exchanges parameters. Remove the key, or use every: 1"
        if self.feedback and self.every > 1:
            yield "feedback", f"is for gradients, but every: {self.every} exchanges parameters. Remove the key, or use every: 1"
        elif self.feedback and self.wire != "int8":
            yield "feedback", f"returns what rounding to int8 took away, but wire is {self.wire}. Use wire: int8, or remove the key"

    def _fragment_problems(self) -> Iterator[tuple[str, str]]:
        if self.every == 1:
            for key, value in (("fragments", self.fragments - 1), ("overlap", self.overlap)):
                if value:
                    yield key, "is about exchanges of parameters, but every: 1 exchanges gradients. Raise every, or remove the key"
        elif self.fragments > self.every:
            yield (
                "fragments",
                f"{self.fragments} do not fit into a phase of {self.every} steps, with a step for each. Use at most {self.every}",
            )
        elif self.overlap * self.fragments >= self.every:
            limit = f"the next fragment follows after {self.every // self.fragments} steps"
            yield "overlap", f"{self.overlap} steps are too many: {limit}. Use fewer, or 0"
        if self.blend is not None and not self.overlap:
            yield "blend", "is how replicas take over what was exchanged some steps before, but overlap is 0. Set it, or remove the key"
        if self.blend == 1:
            yield "blend", "1 would never take over anything from the other replicas. Use less, such as 0.5"
