"""The `pipeline:` section of a run's file, which is `jgt.Pipeline` from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from jgt.document import Bound, InputError, LocalPath
from jgt.schedule.balance import MeasuredCosts, chosen_sizes, even
from jgt.schedule.schedules import CHUNKED, TRIED, find_table
from jgt.schedule.simulate import Costs, Simulation, simulate
from jgt.schedule.table import KINDS, Table

_CHOICES = {"remat": ("none", "layer", "stage"), "gather": ("step", "layer"), "idle": ("compute", "skip", None)}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Runs the layer scan under `signal` over the stages of a mesh axis, microbatch by microbatch.

    signal: the signal whose layer scan is pipelined: `jax.lax.scan`, `nnx.scan` or `nn.scan` directly under it.
    microbatches: the number of parts of the batch that go through the stages one after another. It must divide the rows of each data shard.
    axis: the mesh axis of the stages.
    schedule: `gpipe`, `1f1b`, `interleaved`, `zigzag`, `zb`, `zb_interleaved`, or the path of a [custom
    table](schedules.md#tables-of-ones-own), relative to the run's file.
    virtual: chunks of layers on each stage, for `interleaved` and `zb_interleaved`; null: 2.
    remat: what is saved for the backward pass. none: what the model's own derivative saves; layer: the input of each layer; stage: the
    input of each chunk. With layer and stage, [layers run forward a second time](#recompute).
    gather: when weights that are sharded over the batch's axes (fsdp) are gathered. step: once a step, and gradients are reduce-scattered
    once; layer: layer by layer each time, for less memory and more traffic. Weights that the layers only read in a narrower type travel in
    that type, and their gradients in f32.
    idle: what a stage does in a tick (one time slot of the schedule) in which it has no microbatch: [compute](#idle-stages) on meaningless
    data, or skip. null: skip on CPU devices if possible, otherwise compute.
    layers: the number of layers of each chunk, in the order of the model. Empty: as equal as possible.
    costs: the directory of a run that has measured the [costs of its layers](#stages-of-unequal-cost), by which jgt chooses `layers`.
    stage_costs: the relative time of a layer on the devices of each stage, by which jgt chooses `layers`: `[1, 1, 1.6, 1]` gives the third
    stage fewer.
    per_microbatch: signals whose values may depend on several rows of [one microbatch](#which-functions-can-be-pipelined). Anywhere else
    such a value is an error.

    Raises ValueError for a value that a YAML file's reader would refuse.
    """

    signal: str
    microbatches: Annotated[int, Bound(low=1, high=65_536)]
    axis: str = "stage"
    schedule: LocalPath = "1f1b"
    virtual: Annotated[int, Bound(low=1, high=1_024)] | None = None
    remat: Literal["none", "layer", "stage"] = "none"
    gather: Literal["step", "layer"] = "step"
    idle: Literal["compute", "skip"] | None = None
    layers: tuple[Annotated[int, Bound(low=1, high=65_536)], ...] = ()
    costs: LocalPath | None = None
    stage_costs: tuple[Annotated[float, Bound(low=0.01, high=100)], ...] = ()
    per_microbatch: tuple[str, ...] = ()
    # `compare=False`: the same options are equal wherever they were written, so functions sharded with them share their
    # trace.
    lines: Mapping[str, str] = field(default_factory=dict[str, str], init=False, compare=False, repr=False)
    """The file:line of each key, for messages; the section's own under the key ""."""
    gradients: Literal["f32", "bf16"] = field(default="f32", init=False)
    """The type in which gradients are added up over the batch's axes (`reducing`)."""
    parts: int = field(default=1, init=False)
    """The schedule runs this often in a step, each time with the microbatches of another part of the batch (`in_parts`)."""

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} is {getattr(self, key)!r}, which is not one of {', '.join(map(str, allowed))}")
        for key in ("microbatches", "virtual"):
            if (value := getattr(self, key)) is not None and (not hasattr(value, "__index__")):
                raise ValueError(f"{key} is {value!r}, which is not a whole number")
        # A tuple of one signal without its comma is a text, whose characters would each be taken for a signal.
        if isinstance(self.per_microbatch, str):
            raise ValueError(f"per_microbatch is a tuple of signals, not {self.per_microbatch!r}. Write ({self.per_microbatch!r},)")

    tried: ClassVar[Sequence[tuple[str, int | None]]] = TRIED
    """The schedules, with their numbers of chunks on a stage, that a search tries."""

    @property
    def chunked(self) -> str | None:
        """For a schedule with one chunk of layers on a stage: the name of the one of the same kind with several, if there is one."""
        return CHUNKED.get(self.schedule)

    def table(self, num_stages: int) -> Table:
        """The schedule's table. Raises InputError if there is none for this number of stages."""
        return find_table(self.schedule, num_stages, self.microbatches, self.virtual, self.where("schedule"))

    @property
    def has_sizes(self) -> bool:
        """Whether the numbers of layers of chunks are given or chosen."""
        return bool(self.layers or self.costs or self.stage_costs)

    def sizes(self, table: Table, num_layers: int, inside: Sequence[str] = ()) -> tuple[int, ...]:
        """The number of layers of each chunk. inside: the axes that split a stage's work. Raises InputError if they do not fit."""
        key = "layers" if self.layers else "costs" if self.costs else "stage_costs"
        sizes = self.layers or even(num_layers, table.num_chunks)
        try:
            if self.layers and (self.costs or self.stage_costs):
                raise ValueError("the numbers of layers are given, so costs and stage_costs choose nothing. Leave out one or the other")
            if not self.layers and self.has_sizes:
                costs = None if self.costs is None else MeasuredCosts.read(self.costs, self.where("costs"))
                sizes = chosen_sizes(table, num_layers, costs, self.stage_costs or None, self.costs)
            elif len(sizes) != table.num_chunks or sum(sizes) != num_layers:
                raise ValueError(f"{len(sizes)} chunks with {sum(sizes)} layers, but there are {table.num_chunks} and {num_layers}")
            if self.has_sizes and len(set(sizes)) > 1 and (inside or self.idle == "compute"):
                why = f"the mesh splits layers over {', '.join(inside)}" if inside else "idle is compute"
                raise ValueError(f"stages with {', '.join(map(str, sizes))} layers have to skip what the longest one has more, but {why}")
        except InputError:
            raise
        except ValueError as error:
            raise InputError([self.problem(key, str(error))]) from error
        return sizes

    def simulate(self, num_stages: int, *, with_recompute: bool = False) -> Simulation:
        """The schedule, simulated with items of equal cost. Raises InputError if it has no table for this number of stages.

        with_recompute: a recompute before the backward pass counts, which is as long as a forward pass.
        """
        return simulate(self.table(num_stages), Costs(backward=2 if with_recompute and self.remat != "none" else 1))

    def planned(self, run: str) -> list[tuple[int, str, float, float]]:
        """The stage, the name, the start and the length in milliseconds of each item, by the costs that a run has measured for its layers.

        Without embedding and head. Raises InputError without costs.
        """
        costs = MeasuredCosts.read(run, "pipeline")
        table = self.table(1 + max(cost.stage for cost in costs.layers))
        chunks = costs.chunks(table, self.sizes(table, len(costs.layers)), self.stage_costs or None)
        return [
            (stage, table.item_text(slot.kind, item), slot.start, chunks[item.chunk][KINDS.index(slot.kind)])
            for slot in simulate(table, chunks=chunks).slots
            for stage, item in enumerate(table.rows(slot.kind)[slot.tick])
            if item is not None
        ]

    def axes_inside(self, sizes: Mapping[str, int], batch_axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of a mesh that split a stage's work on its rows: neither the stage axis nor the batch's axes."""
        return tuple(axis for axis, size in sizes.items() if size > 1 and axis not in (self.axis, *batch_axes))

    def reducing(self, gradients: Literal["f32", "bf16"]) -> Self:
        """The same options, with the type in which gradients are added up over the batch's axes.

        With bf16, this is so for matrices that are read in bf16. Microbatches are added up in f32 in any case.
        """
        return self._changed(gradients=gradients)

    def in_parts(self, count: int) -> Self:
        """The same options, for a batch of `count` equal parts of `microbatches` each, which run one after another.

        Gradients are added up over all parts before the batch's axes see them.
        """
        return self._changed(parts=count)

    def located(self, lines: Mapping[str, str]) -> Self:
        """The same options, with the file:line of each key."""
        return self._changed(lines=dict(lines))

    def _changed(self, **values: object) -> Self:
        new = copy(self)
        # The dataclass is frozen, and its constructor does not take these.
        vars(new).update(values)
        return new

    def where(self, key: str) -> str:
        """The beginning of a message about a key: file and line, if known, and the key's name."""
        line = self.lines.get(key) or self.lines.get("")
        return f"{line}: pipeline.{key}" if line else f"pipeline: {key}"

    def problem(self, key: str, message: str) -> str:
        """A message about a key."""
        return f"{self.where(key)}: {message}"
