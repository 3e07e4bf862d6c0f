"""`jgt.Pipeline`, which puts a call into stages: whether it can be, where its program is split, and where its parameters are stored.

The pipeline runs the loss microbatch by microbatch, so it needs the program of one microbatch. jgt gets it by tracing the
user's function again with fewer rows, and a third time with another batch size, to prove that the results of the
whole batch can be added up from its parts (`jgt.pipeline.batch`). Then the program is split around the layer scan: the part
before the layers, one layer, and the part after them. The rules are applied to each part where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.document import InputError, nearest
from jgt.pipeline.chunks import Chunks, staged_places, stored_dims, stored_form
from jgt.pipeline.config import PipelineConfig
from jgt.pipeline.executor import Executor
from jgt.pipeline.microbatches import Microbatches, find_microbatches
from jgt.pipeline.pipelined import Pipelined
from jgt.pipeline.split import Split, split_loss
from jgt.pipeline.whole_program import SplitError
from jgt.program import jaxpr as jx
from jgt.program.constraints import constrain
from jgt.program.dataflow import is_random_key, is_scanned
from jgt.program.dims import Dims, partition_spec
from jgt.program.jaxpr import Program, Var
from jgt.program.places import Place, mesh_around
from jgt.replacements.experts.local import with_local_experts
from jgt.replacements.replacement import ParameterPlace, Replacement
from jgt.rules import Rules
from jgt.schedule.table import Table
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.placement import Surroundings
from jgt.sharding.rewrite import rewrite_part
from jgt.sharding.staged import Run, StagedCall, StoredCall
from jgt.sharding.storage import Form


@dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineConfig):
    __doc__ = PipelineConfig.__doc__

    @classmethod
    def of(cls, options: PipelineConfig | None) -> Pipeline | None:
        """The pipeline with the options of a run's file; None without options."""
        if options is None:
            return None
        new = cls(**{field.name: getattr(options, field.name) for field in fields(options) if field.init})
        return new._changed(lines=options.lines, gradients=options.gradients, parts=options.parts)

    def stage(
        self,
        arguments: Arguments,
        traced: Traced,
        rules: Rules,
        site: Surroundings,
        replacements: Sequence[Replacement],
        parameters: tuple[ParameterPlace, ...],
    ) -> StagedCall:
        """Puts a call with this trace into the pipeline. Raises ValueError inside a shard_map, or a vmap that does not split the batch."""
        return staged_call(arguments, traced, self, rules, site, replacements, parameters)


def staged_call(
    arguments: Arguments,
    traced: Traced,
    pipeline: PipelineConfig,
    rules: Rules,
    site: Surroundings,
    replacements: Sequence[Replacement],
    parameters: tuple[ParameterPlace, ...],
) -> StagedCall:
    """A call with this trace, put into its pipeline.

    Raises ValueError inside a shard_map, or a vmap over a mesh axis that does not split the batch.
    """
    if mesh_around() is not None:
        raise ValueError("a pipelined function cannot be called inside shard_map. Put it inside the function")
    mesh, num_params, program = site.mesh, len(parameters), traced.program
    sizes = dict(mesh.shape)
    batch = find_microbatches(
        arguments.inputs,
        rules,
        sizes,
        claimed=site.claimed,
        is_drawn_from=lambda index: is_random_key(program, num_params + index),
        is_scanned=lambda index: is_scanned(program, num_params + index),
    )
    if others := sorted(site.claimed.difference(batch.replicas)):
        raise ValueError(
            f"a pipelined function cannot be called inside a vmap over the mesh axis {others[0]}, which does not split its batch. "
            "Put the vmap inside the function"
        )
    problems = [*batch.problems, *_axis_problems(pipeline, batch, sizes), *batch.division_problems(pipeline)]
    table = _table(pipeline, sizes, problems)
    # Without a table, or with microbatches that do not divide the batch, there is no microbatch to trace.
    if problems or table is None:
        return _unstaged(parameters, problems)
    try:
        parts = _split_call(arguments, traced, pipeline, batch, num_params)
    except SplitError as error:
        return _unstaged(parameters, [pipeline.problem("signal", str(error))])
    # Only the split program shows how many layers there are.
    if table.num_chunks > parts.num_layers:
        return _unstaged(parameters, [_too_few_layers(pipeline, table, parts.num_layers)])
    parameters = staged_places(parameters, parts, table, pipeline.axis, (*batch.replicas, *batch.axes), sizes)
    parts, held = _with_local_experts(parts, parameters, rules, batch.axes, sizes)
    executor = Executor(
        split=parts,
        held=held,
        table=table,
        pipeline=pipeline,
        mesh=mesh,
        batch_axes=batch.axes,
        replicas=batch.replicas,
        inputs=batch.inputs,
        param_dims=[site.free_dims(p.dims) for p in parameters],
        param_signals=[tuple(p.signals[0].split("/")) if len(p.signals) == 1 else () for p in parameters],
        # Misfits were reported for the whole program. Here the same rules are applied to its parts, each where it runs.
        rewrite=lambda program, place: rewrite_part(program, place, rules, site, replacements),
        rewrite_shared=lambda program, arguments: rewrite_part(program, Place(), rules, site, replacements, arguments),
    )
    # Without the axes of a vmap around, over which optimizer state may be split (ZeRO-1).
    pipelined, places = Pipelined(executor), [(site.free_dims(p.dims), site.free_dims(p.optimizer_dims)) for p in parameters]
    stored = _stored_call(pipelined, parameters, places, batch.dims)
    return StagedCall(parameters=parameters, run=_run_of(pipelined, places, batch.dims), stored=stored)


def _stored_call(
    pipelined: Pipelined, parameters: Sequence[ParameterPlace], places: Sequence[tuple[Dims, Dims]], inputs: Sequence[Dims]
) -> StoredCall | None:
    """The same call with its stacks stored on their stages; None if they cannot be, or need not be."""
    executor = pipelined.executor
    parts, table, axis = executor.split, executor.table, executor.pipeline.axis
    chunks = Chunks(num_layers=parts.num_layers, num_stages=table.num_stages, stages=table.stages)
    stacks = frozenset(parts.like[v] for v in parts.weights if v in parts.like)
    if chunks.are_neighbours or any(parameters[index].dims[0] for index in stacks) or not pipelined.can_be_stored():
        return None
    on_stages = [(stored_dims(a, axis), stored_dims(b, axis)) if i in stacks else (a, b) for i, (a, b) in enumerate(places)]
    there = Pipelined(replace(executor, is_stored=True, param_dims=[ahead for ahead, _ in on_stages]))
    paths = frozenset(parameters[i].path for i in stacks)

    def form_of(place: ParameterPlace) -> Form | None:
        return stored_form(place, chunks, axis) if place.path in paths else None

    return StoredCall(form_of=form_of, run=_run_of(there, on_stages, inputs))


def _run_of(pipelined: Pipelined, places: Sequence[tuple[Dims, Dims]], inputs: Sequence[Dims]) -> Run:
    """A function that runs a pipelined call. places: the dims of each parameter and of its gradient. inputs: the dims of other arrays."""
    mesh = pipelined.executor.mesh

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        # Not strict: the inputs follow the parameters in `arrays`.
        params = [_pinned(x, ahead, behind, mesh) for x, (ahead, behind) in zip(arrays, places, strict=False)]
        others = [_pinned(x, dims, dims, mesh) for x, dims in zip(arrays[len(places) :], inputs, strict=True)]
        return pipelined(params, others)

    return run


def _unstaged(parameters: tuple[ParameterPlace, ...], problems: Sequence[str]) -> StagedCall:
    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        raise InputError(problems)

    return StagedCall(parameters=parameters, run=run, problems=tuple(problems))


def _axis_problems(pipeline: PipelineConfig, batch: Microbatches, sizes: dict[str, int]) -> Iterator[str]:
    axes = list(sizes)
    if pipeline.axis not in axes:
        yield pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {nearest(pipeline.axis, axes)}")
        return
    split = (*batch.replicas, *batch.axes)
    if pipeline.axis in split:
        yield pipeline.problem("axis", f"the inputs are sharded over {pipeline.axis}. Take it out of inputs: and batch")
    inside = pipeline.axes_inside(sizes, split)
    if pipeline.idle == "skip" and inside:
        yield pipeline.problem(
            "idle",
            f"stages can skip layers only if each device computes its layers alone, but the mesh splits them over {', '.join(inside)}. "
            "Write compute, or leave it out",
        )
    late = [axis for axis in split if axes.index(axis) > axes.index(pipeline.axis)]
    if late:
        # XLA requires the manual axes of nested shard_maps in the order of the mesh.
        yield pipeline.problem(
            "axis",
            f"in the mesh {pipeline.axis} must come after {', '.join(late)}, over which the batch is split. "
            "To keep the placement of devices, pass the order as jgt.make_mesh(sizes, axis_names=...)",
        )


def _table(pipeline: PipelineConfig, sizes: dict[str, int], problems: list[str]) -> Table | None:
    if pipeline.axis not in sizes:
        return None
    with InputError.collect(problems):
        return pipeline.table(sizes[pipeline.axis])
    return None


def _split_call(arguments: Arguments, traced: Traced, pipeline: PipelineConfig, batch: Microbatches, num_params: int) -> Split:
    """The call's program split for microbatches, from its traces at up to three batch sizes. Raises SplitError."""
    batched = [False] * num_params + [kind == "rows" for kind in batch.inputs]
    keys = [num_params + index for index in batch.keys]

    def trace(num_rows: int) -> Program:
        try:
            return arguments.trace_rows(batched, num_rows, traced.changed)
        # Any exception: here the user's function runs at a batch size that its author may not have thought of.
        except Exception as error:
            names = ", ".join(name for name, kind in zip(batch.names, batch.inputs, strict=True) if kind == "rows")
            raise SplitError(
                f"with {num_rows} instead of {batch.num_rows} rows in {names} the function fails: "
                f"{str(error).splitlines()[0].rstrip('.')}. If one of them is not the batch, give it the rule [] under inputs:"
            ) from error

    rows = batch.num_rows // (pipeline.parts * pipeline.microbatches * batch.num_shards)
    program = traced.program
    micro = program if rows == batch.num_rows else trace(rows)
    # The microbatch's own trace is the second batch size if it can be. That saves one call of the user's function.
    # JAX may trace another program for a single row, because it leaves out broadcasts and indexing for a dim of size 1.
    larger, ratio = (micro, rows / batch.num_rows) if 1 < rows < batch.num_rows else (trace(2 * batch.num_rows), 2.0)
    return split_loss(micro, program, larger, pipeline, ratio=ratio, num_params=num_params, keys=keys)


def _with_local_experts(
    parts: Split, parameters: Sequence[ParameterPlace], rules: Rules, batch_axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Split, dict[Var, str]]:
    """The split program whose layers have the experts of one device, and by weight the axis that holds these."""
    body: Program = parts.scan.params["jaxpr"]
    local, axes = with_local_experts(body, parts.place, rules, sizes, batch_axes)
    held = {var: axis for index, axis in axes.items() if jx.is_var(var := parts.scan.invars[index])}
    # The rules have to split the experts of each of them, which come after the dim of layers.
    fits = all(v in parts.weights and v in parts.like and axis in parameters[parts.like[v]].dims[1] for v, axis in held.items())
    if not held or not fits:
        return parts, {}
    scan = parts.scan.replace(params={**parts.scan.params, "jaxpr": local})
    return replace(parts, scan=scan), held


def _too_few_layers(pipeline: PipelineConfig, table: Table, num_layers: int) -> str:
    held = f"{table.num_stages} stages" if table.virtual == 1 else f"{table.num_stages} stages with {table.virtual} chunks each"
    layers = f"{num_layers} layer{'s' * (num_layers != 1)}"
    return pipeline.problem("signal", f"{pipeline.signal!r} has {layers}, too few for {held}. Make {pipeline.axis} or virtual smaller")


def _pinned(x: jax.Array, forward: Dims, backward: Dims, mesh: Mesh | AbstractMesh) -> jax.Array:
    """A value constrained to one layout, and its gradient to another."""
    ahead, behind = (NamedSharding(mesh, partition_spec(dims)) for dims in (forward, backward))
    return constrain(x, ahead, behind)
