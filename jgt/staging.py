"""A call put into a pipeline: what keeps it out, where its programs are cut, where its parameters are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt import jaxpr as jx
from jgt.document import collect, nearest
from jgt.jaxpr import Program
from jgt.microbatches import Microbatches, find_microbatches
from jgt.pipeline.config import Pipeline
from jgt.pipeline.custom import find_table
from jgt.pipeline.layer_scan import SplitError
from jgt.pipeline.layout import Dims
from jgt.pipeline.schedule import Table
from jgt.pipeline.split import Split, split
from jgt.pipelined import Pipelined
from jgt.placement import ParameterPlace
from jgt.rewrite import Rewriter, partition_spec
from jgt.rules import Matcher, Rules


class Traceable(Protocol):
    """What staging needs of a call: its arguments with their paths, and its program at other batch sizes."""

    named: list[tuple[Any, Any]]

    def trace_rows(self, which: Sequence[bool], num_rows: int) -> Program:
        """The program with this many rows in the arrays of which the first dim is the batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class StagedCall:
    """A call whose layers a pipeline runs: its parameters' places, and how to run it on the arguments' arrays."""

    parameters: tuple[ParameterPlace, ...]
    run: Callable[[Sequence[Any]], list[Any]]


def stage(
    call: Traceable, program: Program, pipeline: Pipeline, rules: Rules, mesh: Mesh | AbstractMesh, parameters: tuple[ParameterPlace, ...], problems: list[str]
) -> StagedCall | None:
    """Puts a call, of which `program` is the trace, into its pipeline; None with `problems` added where that is impossible."""
    if jx.mesh_around() is not None or jx.vmapped_axes():
        raise ValueError("a pipelined function cannot stand inside shard_map, or a vmap over a mesh axis; put them inside of it")
    num_params, sizes, before = len(parameters), dict(mesh.shape), len(problems)
    found = find_microbatches(call.named[num_params:], rules, sizes, lambda index: jx.is_random_key(program, num_params + index))
    problems += [*found.problems, *_axis_problems(pipeline, found, sizes), *found.division_problems(pipeline)]
    table = _table(pipeline, sizes, problems)
    if len(problems) > before or table is None:
        return None
    try:
        cut = _cut(call, program, pipeline, found, num_params)
    except SplitError as error:
        problems.append(pipeline.problem("signal", str(error)))
        return None
    if table.num_chunks > cut.num_layers:
        problems.append(_too_few_layers(pipeline, table, cut.num_layers))
        return None
    parameters = _staged_places(parameters, cut, pipeline.axis, table.num_stages)
    pipelined = Pipelined(
        split=cut,
        table=table,
        pipeline=pipeline,
        mesh=mesh,
        batch_axes=found.axes,
        inputs=found.inputs,
        param_dims=[p.dims for p in parameters],
        param_signals=[tuple(p.signals[0].split("/")) if len(p.signals) == 1 else () for p in parameters],
        # Misfits were reported for the whole program; here the same rules are applied to its parts, each where it runs.
        rewrite=lambda program, place: Rewriter(Matcher(rules), mesh).rewrite_part(program, place),
    )

    def run(arrays: Sequence[Any]) -> list[Any]:
        params = [_pinned(x, p.dims, p.optimizer_dims, mesh) for x, p in zip(arrays, parameters, strict=False)]
        inputs = [_pinned(x, dims, dims, mesh) for x, dims in zip(arrays[num_params:], found.dims, strict=True)]
        return pipelined(params, inputs)

    return StagedCall(parameters=parameters, run=run)


def _axis_problems(pipeline: Pipeline, found: Microbatches, sizes: dict[str, int]) -> Iterator[str]:
    axes = list(sizes)
    if pipeline.axis not in axes:
        yield pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {nearest(pipeline.axis, axes)}")
        return
    if pipeline.axis in found.axes:
        yield pipeline.problem("axis", f"the inputs are sharded over {pipeline.axis}. Take it out of inputs: and batch")
    inside = [axis for axis, size in sizes.items() if size > 1 and axis not in (pipeline.axis, *found.axes)]
    if pipeline.idle == "skip" and inside:
        yield pipeline.problem(
            "idle",
            f"stages can only skip layers that none of their devices shares with another, and the mesh splits them over {', '.join(inside)}. "
            "Write compute, or leave it out",
        )
    late = [axis for axis in found.axes if axes.index(axis) > axes.index(pipeline.axis)]
    if late:
        # XLA wants the manual axes of shard_maps inside each other in the order of the mesh.
        yield pipeline.problem(
            "axis",
            f"in the mesh {pipeline.axis} must come after {', '.join(late)}, over which the batch is split. "
            "Where devices are placed may stay: jgt.make_mesh(sizes, axis_names=...)",
        )


def _table(pipeline: Pipeline, sizes: dict[str, int], problems: list[str]) -> Table | None:
    if pipeline.axis not in sizes:
        return None
    with collect(problems):
        return find_table(pipeline.schedule, sizes[pipeline.axis], pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    return None


def _cut(call: Traceable, program: Program, pipeline: Pipeline, found: Microbatches, num_params: int) -> Split:
    """The call's program cut for microbatches, by its traces at three batch sizes at most. Raises SplitError."""
    batched = [False] * num_params + [one.kind == "rows" for one in found.inputs]
    keys = [num_params + index for index, one in enumerate(found.inputs) if one.kind == "key"]

    def trace(num_rows: int) -> Program:
        try:
            return call.trace_rows(batched, num_rows)
        except Exception as error:
            names = ", ".join(name for name, one in zip(found.names, found.inputs, strict=True) if one.kind == "rows")
            raise SplitError(
                f"with {num_rows} instead of {found.num_rows} rows in {names} the function fails: {str(error).splitlines()[0].rstrip('.')}. "
                "If one of them is not the batch, give it the rule [] under inputs:"
            ) from error

    rows = found.num_rows // (pipeline.microbatches * found.num_shards)
    micro = program if rows == found.num_rows else trace(rows)
    # A batch of one row may be another program: broadcasts and indexing are left out there.
    larger, ratio = (micro, rows / found.num_rows) if 1 < rows < found.num_rows else (trace(2 * found.num_rows), 2.0)
    return split(micro, program, larger, ratio=ratio, signal=pipeline.signal, num_params=num_params, keys=keys, trusted=pipeline.per_microbatch)


def _too_few_layers(pipeline: Pipeline, table: Table, num_layers: int) -> str:
    held = f"{table.num_stages} stages" if table.virtual == 1 else f"{table.num_stages} stages with {table.virtual} chunks each"
    layers = f"{num_layers} layer{'s' * (num_layers != 1)}"
    return pipeline.problem("signal", f"{pipeline.signal!r} has {layers}, too few for {held}. Make {pipeline.axis} or virtual smaller")


def _staged_places(parameters: tuple[ParameterPlace, ...], cut: Split, axis: str, num_stages: int) -> tuple[ParameterPlace, ...]:
    """Layers' parameters are stored by stage where the stages divide the layers."""
    if cut.num_layers % num_stages:
        return parameters
    staged = {cut.like[var] for var in cut.weights if var in cut.like}
    first: Dims = ((axis,),)

    def place(index: int, one: ParameterPlace) -> ParameterPlace:
        if index not in staged or one.dims[0] or one.optimizer_dims[0]:
            return one
        return replace(one, dims=first + one.dims[1:], optimizer_dims=first + one.optimizer_dims[1:])

    return tuple(place(i, p) for i, p in enumerate(parameters))


def _pinned(x: Any, forward: Dims, backward: Dims, mesh: Mesh | AbstractMesh) -> Any:
    """A value with its sharding, and its gradient with another."""
    ahead, behind = (NamedSharding(mesh, partition_spec(dims)) for dims in (forward, backward))
    return jx.pinned(x, ahead, behind)
