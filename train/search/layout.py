"""One layout of a run: mesh, rules, parts of the batch, recompute and pipeline.

Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jgt.pipeline.config import PipelineConfig

STAGE = "stage"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A pipeline. gather: whether weights become whole once a step or layer by layer."""

    schedule: str
    virtual: int | None
    microbatches: int
    remat: str
    gather: str

    @classmethod
    def of(cls, pipeline: PipelineConfig) -> Stages:
        """The section `pipeline:` of a run."""
        p = pipeline
        return cls(schedule=p.schedule, virtual=p.virtual, microbatches=p.microbatches, remat=p.remat, gather=p.gather)

    @property
    def text(self) -> str:
        """Such as `interleaved 2 x 16, layer`."""
        chunks = "" if self.virtual is None else f" {self.virtual}"
        remat = "" if self.remat == "none" else f", {self.remat}"
        return f"{self.schedule}{chunks} x {self.microbatches}{remat}{', gather layer' if self.gather == 'layer' else ''}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout. mesh: axes outermost first. rules: `jgt:fsdp`, or None for the rules of the run's file. remat: None for the file's.

    batch_axes: the axes that split the batch. rows: the rows of the batch that a device computes at once.
    """

    mesh: tuple[tuple[str, int], ...]
    rules: str | None
    batch_axes: tuple[str, ...]
    accumulate: int
    rows: int
    remat: str | None
    stages: Stages | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh as a mapping."""
        return dict(self.mesh)

    @property
    def parts(self) -> int:
        """The number of parts that a step computes one after another."""
        return self.accumulate if self.stages is None else self.stages.microbatches

    @property
    def overrides(self) -> list[str]:
        """The layout as assignments of a command line, which `load` takes."""
        found = [f"mesh={{{', '.join(f'{axis}: {size}' for axis, size in self.mesh)}}}", f"train.accumulate={self.accumulate}"]
        if self.rules is not None:
            found.append(f"rules={self.rules}")
        if self.remat is not None:
            found.append(f"train.remat={self.remat}")
        if (s := self.stages) is not None:
            values = {"signal": "layers", "axis": STAGE, "schedule": s.schedule, "microbatches": s.microbatches, "remat": s.remat}
            values |= {} if s.virtual is None else {"virtual": s.virtual}
            values |= {"gather": s.gather}
            found.append(f"pipeline={{{', '.join(f'{key}: {value}' for key, value in values.items())}}}")
        return found

    def to_document(self) -> dict[str, Any]:
        """The layout as the sections of a run's file."""
        train: dict[str, Any] = {"accumulate": self.accumulate}
        found: dict[str, Any] = {"mesh": self.sizes}
        if self.rules is not None:
            found["rules"] = self.rules
        if (s := self.stages) is not None:
            virtual = {} if s.virtual is None else {"virtual": s.virtual}
            pipeline = {"signal": "layers", "axis": STAGE, "schedule": s.schedule, "microbatches": s.microbatches, **virtual}
            found["pipeline"] = {**pipeline, "remat": s.remat, "gather": s.gather}
        if self.remat is not None:
            train["remat"] = self.remat
        return {**found, "train": train}

    @property
    def mesh_text(self) -> str:
        """Such as `fsdp 8 x tensor 4`; axes of size 1 are left out."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh if size > 1) or "1 device"


def simplicity(candidate: Candidate) -> tuple[object, ...]:
    """Layouts that need little memory and few collectives come first."""
    sizes = candidate.sizes
    split = sizes.get("fsdp", 1) * sizes.get("tensor", 1) * sizes.get("expert", 1)
    # A loop needs a second plan, without the loop.
    is_looped = candidate.accumulate > 1
    return (candidate.stages is not None, is_looped, candidate.remat not in ("block", None), -split, sizes.get("tensor", 1), candidate.rows)


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """Layouts of one kind have programs of one form."""
    sizes, stages = candidate.sizes, candidate.stages
    return (sizes.get("tensor", 1) > 1, candidate.remat, None if stages is None else stages.remat)


def form_of(candidate: Candidate) -> tuple[object, ...]:
    """Of layouts of one form, only sizes differ."""
    s = candidate.stages
    return (candidate.rules, candidate.remat, None if s is None else (s.schedule, s.remat, s.gather))


def num_changes(one: Candidate, other: Candidate) -> int:
    """In how many things two layouts differ: mesh, rules, rows at once, what is recomputed, and a pipeline's schedule and gathers."""

    def things(c: Candidate) -> tuple[object, ...]:
        s = c.stages
        pipeline = (None, None, None) if s is None else ((s.schedule, s.virtual), s.remat, s.gather)
        # Axes of size 1 may be there or not.
        return (frozenset(pair for pair in c.mesh if pair[1] > 1), c.rules, c.rows, c.remat, *pipeline)

    return sum(a != b for a, b in zip(things(one), things(other), strict=True))


def layout_text(candidate: Candidate) -> str:
    """A layout in one line."""
    rules = "" if candidate.rules is None else f"{candidate.rules.removeprefix('jgt:')}: "
    stages = "" if candidate.stages is None else f", {candidate.stages.text}"
    parts = f" x {candidate.accumulate}" if candidate.accumulate > 1 else ""
    remat = "" if candidate.remat in (None, "none") and candidate.stages else f", remat {candidate.remat or 'as set'}"
    return f"{rules}{candidate.mesh_text}{stages}, rows {candidate.rows}{parts}{remat}"
