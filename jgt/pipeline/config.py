"""The `pipeline:` section, and `jgt.Pipeline` from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from jgt.document import Bound


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Runs the layer scan under `signal` over the stages of a mesh axis, microbatch by microbatch.

    schedule: gpipe, 1f1b, interleaved, zigzag, zb, zb_interleaved, or the path of a CSV table. microbatches: parts of the
    batch. virtual: chunks of layers on each stage, where the schedule leaves it open. remat: none keeps what the model's
    own derivative keeps, layer recomputes each layer from its input, stage each chunk from its input. gather: weights that
    are sharded over the batch's axes are made whole once a step, or layer by layer each time. idle: what a stage without a
    microbatch does in a tick, compute for nothing or skip the layers; None: skip on CPU devices, where others need the cores,
    if the layers of a stage are not split over further axes. per_microbatch: signals in which
    what depends on several rows (routing with a capacity, batch statistics, balance losses) is meant of one microbatch on one
    data shard; anywhere else it is an error, because the result would differ from the unpipelined one.
    """

    signal: str
    microbatches: Annotated[int, Bound(low=1, high=65_536)]
    axis: str = "stage"
    schedule: str = "1f1b"
    virtual: Annotated[int, Bound(low=1, high=1_024)] | None = None
    remat: Literal["none", "layer", "stage"] = "none"
    gather: Literal["step", "layer"] = "step"
    idle: Literal["compute", "skip"] | None = None
    per_microbatch: tuple[str, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The file:line of each key, for messages; of the section under the key ""."""

    def __post_init__(self) -> None:
        """Raises ValueError for what a YAML file's reader would have refused."""
        for key, allowed in (("remat", ("none", "layer", "stage")), ("gather", ("step", "layer")), ("idle", ("compute", "skip", None))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} is {getattr(self, key)!r}, which is not one of {', '.join(map(str, allowed))}")
        if isinstance(self.per_microbatch, str):
            raise ValueError(f"per_microbatch is a tuple of signals, not {self.per_microbatch!r}. Write ({self.per_microbatch!r},)")

    def located(self, lines: Mapping[str, str]) -> Pipeline:
        """The same, with the lines that its keys stand in."""
        new = replace(self)
        object.__setattr__(new, "lines", dict(lines))
        return new

    def where(self, key: str) -> str:
        """What a message about a key begins with: its file and line, where it has one, and its name."""
        line = self.lines.get(key) or self.lines.get("")
        return f"{line}: pipeline.{key}" if line else f"pipeline: {key}"

    def problem(self, key: str, message: str) -> str:
        """A message about a key."""
        return f"{self.where(key)}: {message}"
