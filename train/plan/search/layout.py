"""One layout of a run: mesh, rules, parts of the batch, recompute and pipeline, and what the rules make of the mesh's axes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jgt import PipelineConfig, Rules


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles that rules give to the axes of a mesh, read from their specs. Names of axes and of files mean nothing here.

    batch: the axes that split the batch. state: those that also split the optimizer's state, but no weights (ZeRO-1). weights: those that
    also split weights, which are gathered for their use (ZeRO-3). experts: axes that hold experts. tensor: axes outside of the batch that
    split weights where they are multiplied. context: the axes that split the sequence in attention too (`context:`); where they split
    weights, they are among `weights`. others: the remaining axes that a spec names. sequence: whether the activations between blocks
    are split along their second dim over an axis of `tensor`. overlap: whether matmuls hide the sends of one.
    """

    batch: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    sequence: bool = False
    overlap: bool = False

    @classmethod
    def of(cls, rules: Rules, stage: str) -> Roles:
        """The roles of all axes that the rules name. stage: the axis along which a pipeline would have its stages, one of `others`."""
        rule = rules.match_input("batch/inputs", 2).rule
        batch = () if rule is None else rule.dims(2)[0]
        experts = {signal.experts.axis for signal in rules.signals if signal.experts}
        overlap = {signal.overlap.axis for signal in rules.signals if signal.overlap}
        optimizer = [*rules.optimizer, *(spec for signal in rules.signals for spec in signal.optimizer)]
        in_state = {axis for spec in optimizer for axis in spec.axes}
        in_weights = rules.axes_of_parameters() - {*experts, stage}
        context = tuple(dict.fromkeys(one.axis for one in rules.contexts if one.axis not in batch))
        named = list(dict.fromkeys([*(axis for spec in rules.spec_rules() for axis in spec.axes), *experts, *overlap]))
        weights = [axis for axis in (*batch, *context) if axis in in_weights]
        state = [axis for axis in batch if axis in in_state and axis not in (*weights, *experts)]
        tensor = [axis for axis in named if axis in in_weights and axis not in (*batch, *context)]
        # [batch, seq, embed]
        outs = [signal.out.spec for signal in rules.signals if signal.out is not None]
        along = {axis for spec in outs if ... not in spec[:2] for axes in spec[1:2] if axes is not ... for axis in axes}
        return cls(
            batch=batch,
            state=tuple(state),
            weights=tuple(weights),
            experts=tuple(axis for axis in named if axis in experts),
            tensor=tuple(tensor),
            context=context,
            others=tuple(axis for axis in named if axis not in (*batch, *tensor, *experts, *context)),
            sequence=not along.isdisjoint(tensor),
            overlap=not overlap.isdisjoint(tensor),
        )

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes of the batch along which each device has all weights that its neighbour has."""
        return tuple(axis for axis in self.batch if axis not in (*self.weights, *self.experts))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout. mesh: axes outermost first. rules: `jgt:fsdp`, or None for the rules of the run's file. remat: None for the file's.

    rows: the rows of the batch that a device computes at once.
    """

    mesh: tuple[tuple[str, int], ...]
    rules: str | None
    roles: Roles
    accumulate: int
    rows: int
    remat: str | None
    stages: PipelineConfig | None = None

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along some axes together."""
        sizes = dict(self.mesh)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    @property
    def num_stages(self) -> int:
        """1 without a pipeline."""
        return 1 if self.stages is None else self.size([self.stages.axis])

    @property
    def parts(self) -> int:
        """The number of parts that a step computes one after another."""
        return self.accumulate if self.stages is None else self.stages.microbatches

    @property
    def rows_at_once(self) -> int:
        """The rows of the batch that all devices compute at once."""
        return self.size(self.roles.batch) * self.rows

    @property
    def overrides(self) -> list[str]:
        """The layout as assignments of a command line, which `load` takes."""
        sections = self.to_document()
        train = {f"train.{key}": value for key, value in sections.pop("train").items()}
        # JSON is YAML.
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in {**sections, **train}.items()]

    def to_document(self) -> dict[str, Any]:
        """The layout as the sections of a run's file."""
        rules = {} if self.rules is None else {"rules": self.rules}
        pipeline: dict[str, object] = {}
        if self.stages is not None:
            keys = ("signal", "axis", "schedule", "microbatches", "virtual", "remat", "gather")
            pipeline = {"pipeline": {key: value for key in keys if (value := getattr(self.stages, key)) is not None}}
        remat = {} if self.remat is None else {"remat": self.remat}
        return {"mesh": dict(self.mesh), **rules, **pipeline, "train": {"accumulate": self.accumulate, **remat}}

    @property
    def text(self) -> str:
        """The layout in one line; axes of size 1 are left out."""
        rules = "" if self.rules is None else f"{self.rules.removeprefix('jgt:')}: "
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh if size > 1) or "1 device"
        stages = "" if self.stages is None else f", {_pipeline_text(self.stages)}"
        parts = f" x {self.accumulate}" if self.accumulate > 1 else ""
        remat = "" if self.remat in (None, "none") and self.stages else f", remat {self.remat or 'as set'}"
        return f"{rules}{mesh}{stages}, rows {self.rows}{parts}{remat}"


def _pipeline_text(p: PipelineConfig) -> str:
    """Text such as `interleaved 2 x 16, layer`."""
    chunks = "" if p.virtual is None else f" {p.virtual}"
    remat = "" if p.remat == "none" else f", {p.remat}"
    return f"{p.schedule}{chunks} x {p.microbatches}{remat}{', gather layer' if p.gather == 'layer' else ''}"


def num_changes(one: Candidate, other: Candidate) -> int:
    """In how many things two layouts differ: mesh, rules, rows at once, what is recomputed, and a pipeline's schedule and gathers."""

    def things(c: Candidate) -> tuple[object, ...]:
        s = c.stages
        pipeline = (None, None, None) if s is None else ((s.schedule, s.virtual), s.remat, s.gather)
        # Axes of size 1 may be there or not.
        return (frozenset(pair for pair in c.mesh if pair[1] > 1), c.rules, c.rows, c.remat, *pipeline)

    return sum(a != b for a, b in zip(things(one), things(other), strict=True))
