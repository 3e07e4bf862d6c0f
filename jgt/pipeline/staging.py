"""`jgt.Pipeline`, which puts a call into stages: whether it can be, where its program is split, and where its parameters are stored.

The pipeline needs the program of one microbatch. jgt gets it by tracing the user's function again with fewer rows, and a third time with
another batch size, to prove that the results of the whole batch can be added up from its parts (`jgt.pipeline.batch`). Then the program is
split around the layer scan, and the rules are applied to each part where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jgt.document import InputError, nearest
from jgt.pipeline.batch import joined_results
from jgt.pipeline.chunks import Chunks, staged_places, stored_dims, stored_form
from jgt.pipeline.config import PipelineConfig
from jgt.pipeline.links.moves import Moves
from jgt.pipeline.microbatches import Microbatches, find_microbatches
from jgt.pipeline.pipelined import Pipelined
from jgt.pipeline.split import Split, split_loss
from jgt.pipeline.whole_program import SplitError
from jgt.program import jaxpr as jx
from jgt.program.constraints import constrain
from jgt.program.dims import Dims, partition_spec
from jgt.program.jaxpr import Program, Var
from jgt.program.places import Place, mesh_around
from jgt.replacements.experts.local import with_local_experts
from jgt.replacements.replacement import ParameterPlace, Replacement
from jgt.rules import Rules
from jgt.schedule.table import Table
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.placement import CallContext
from jgt.sharding.rewrite import rewrite_part
from jgt.sharding.sharded import Sharded
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
        return cls(signal=options.signal, microbatches=options.microbatches)._changed(**vars(options))

    @staticmethod
    def results_of_parts(function: Sharded[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The way in which each result, in the result's tree, is joined from parts of the batch. Raises InputError as a call does.

        The batch is the first dim of the first input that has dims.
        """
        arguments, planned = function.planned(*args, **kwargs)
        num_params = len(arguments.parameters)
        shapes = [() if one.is_state or one.is_key else one.x.shape for one in arguments.inputs]
        rows = next((shape[0] for shape in shapes if shape), 0)
        batched = [False] * num_params + [bool(shape) and shape[0] == rows for shape in shapes]
        larger = arguments.trace_rows(batched, 2 * rows, planned.changed)
        results = joined_results(planned.program, larger, ratio=2.0, num_params=num_params)
        return jax.tree.unflatten(planned.out_tree, results[: planned.out_tree.num_leaves])

    def stage(
        self,
        arguments: Arguments,
        traced: Traced,
        rules: Rules,
        site: CallContext,
        replacements: Sequence[Replacement],
        parameters: tuple[ParameterPlace, ...],
    ) -> StagedCall:
        """Puts a call with this trace into the pipeline.

        Raises InputError if it cannot be pipelined, and ValueError inside a shard_map, or a vmap that does not split the batch.
        """
        if mesh_around() is not None:
            raise ValueError("a pipelined function cannot be called inside shard_map. Put it inside the function")
        batch = find_microbatches(arguments.inputs, traced.program, rules, site.sizes, site.claimed)
        if others := sorted(site.claimed.difference(batch.replicas)):
            raise ValueError(
                f"a pipelined function cannot be called inside a vmap over the mesh axis {others[0]}, which does not split its batch. "
                "Put the vmap inside the function"
            )
        return _Staging(self, arguments, traced, rules, site, replacements, parameters, batch).staged()


@dataclass(frozen=True)
class _Staging:
    """A call on its way into the stages, with the kinds of its inputs."""

    pipeline: PipelineConfig
    arguments: Arguments
    traced: Traced
    rules: Rules
    site: CallContext
    replacements: Sequence[Replacement]
    parameters: tuple[ParameterPlace, ...]
    batch: Microbatches

    def staged(self) -> StagedCall:
        """The call, split around its layers and laid out over the stages. Raises InputError."""
        pipeline, sizes, table = self.pipeline, self.site.sizes, None
        problems = [*self.batch.problems, *self._axis_problems(), *self.batch.division_problems(pipeline)]
        if pipeline.axis in sizes:
            with InputError.collect(problems):
                table = pipeline.table(sizes[pipeline.axis])
        # Without a table, or with microbatches that do not divide the batch, there is no microbatch to trace.
        if problems or table is None:
            raise InputError(problems)
        try:
            split = self._split()
        except SplitError as error:
            raise InputError([pipeline.problem("signal", str(error))]) from error
        # Only the split program shows how many layers there are.
        if table.num_chunks > split.num_layers:
            held = f"{table.num_stages} stages" if table.virtual == 1 else f"{table.num_stages} stages with {table.virtual} chunks each"
            layers = f"{split.num_layers} layer{'s' * (split.num_layers != 1)}"
            problem = f"{pipeline.signal!r} has {layers}, too few for {held}. Make {pipeline.axis} or virtual smaller"
            raise InputError([pipeline.problem("signal", problem)])
        batch_axes = (*self.batch.replicas, *self.batch.axes)
        sizes_of_chunks = pipeline.sizes(table, split.num_layers, pipeline.axes_inside(sizes, batch_axes))
        chunks = Chunks(num_stages=table.num_stages, stages=table.stages, sizes=sizes_of_chunks)
        parameters = staged_places(self.parameters, split, chunks, pipeline.axis, batch_axes, sizes)
        pipelined = self._pipelined(split, table, chunks, parameters)
        # Without the axes of a vmap around, over which optimizer state may be split (ZeRO-1).
        places = [(self.site.free_dims(p.dims), self.site.free_dims(p.optimizer_dims)) for p in parameters]
        stored = self._stored(pipelined, parameters, places)
        return StagedCall(parameters=parameters, run=self._run_of(pipelined, places), stored=stored)

    def _axis_problems(self) -> Iterator[str]:
        pipeline, batch, sizes = self.pipeline, self.batch, self.site.sizes
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

    def _split(self) -> Split:
        """The call's program split for microbatches, from its traces at up to three batch sizes. Raises SplitError."""
        pipeline, batch, program, num_params = self.pipeline, self.batch, self.traced.program, len(self.parameters)
        rows = batch.num_rows // (pipeline.parts * pipeline.microbatches * batch.num_shards)
        micro = program if rows == batch.num_rows else self._trace(rows)
        # The microbatch's own trace is the second batch size if it can be. That saves one call of the user's function.
        # JAX may trace another program for a single row, because it leaves out broadcasts and indexing for a dim of size 1.
        has_two = 1 < rows < batch.num_rows
        larger, ratio = (micro, rows / batch.num_rows) if has_two else (self._trace(2 * batch.num_rows), 2.0)
        keys = [num_params + index for index in batch.keys]
        return split_loss(micro, program, larger, pipeline, ratio=ratio, num_params=num_params, keys=keys)

    def _trace(self, num_rows: int) -> Program:
        batch = self.batch
        batched = [False] * len(self.parameters) + [kind == "rows" for kind in batch.inputs]
        try:
            return self.arguments.trace_rows(batched, num_rows, self.traced.changed)
        # Any exception: here the user's function runs at a batch size that its author may not have thought of.
        except Exception as error:
            names = ", ".join(name for name, kind in zip(batch.names, batch.inputs, strict=True) if kind == "rows")
            raise SplitError(
                f"with {num_rows} instead of {batch.num_rows} rows in {names} the function fails: "
                f"{str(error).splitlines()[0].rstrip('.')}. If one of them is not the batch, give it the rule [] under inputs:"
            ) from error

    def _pipelined(self, split: Split, table: Table, chunks: Chunks, parameters: Sequence[ParameterPlace]) -> Pipelined:
        rules, site, replacements, batch = self.rules, self.site, self.replacements, self.batch
        split, held = self._with_local_experts(split, parameters)
        dims = [site.free_dims(p.dims) for p in parameters]
        signals = [tuple(p.signals[0].split("/")) if len(p.signals) == 1 else () for p in parameters]
        moves = Moves(
            mesh=site.mesh,
            axis=self.pipeline.axis,
            batch_axes=batch.axes,
            dims={var: dims[index] for var, index in split.like.items()},
            signals={var: signals[index] for var, index in split.like.items()},
            by_layer=self.pipeline.gather == "layer",
            sums=split.half_matrices() if self.pipeline.gradients == "bf16" else {},
            held=held,
            replicas=batch.replicas,
        )
        # Casts of parameters besides the stacks are laid out like these.
        places = {var: dims[index] for index, var in enumerate(split.arguments[: len(dims)]) if index not in split.stacks}
        known = {n: places[var] for n, var in enumerate(split.shared.inputs) if var in places}
        return Pipelined(
            split=split,
            table=table,
            chunks=chunks,
            pipeline=self.pipeline,
            moves=moves,
            inputs=batch.inputs,
            # Misfits were reported for the whole program. Here the same rules are applied to its parts, each where it runs.
            rewrite=lambda program, place: rewrite_part(program, place, rules, site, replacements),
            rewrite_shared=lambda program: rewrite_part(program, Place(), rules, site, replacements, known),
        )

    def _with_local_experts(self, split: Split, parameters: Sequence[ParameterPlace]) -> tuple[Split, dict[Var, str]]:
        """The split program whose layers have the experts of one device, and by weight the axis that holds these."""
        body: Program = split.scan.params["jaxpr"]
        local, axes = with_local_experts(body, split.place, self.rules, self.site.sizes, self.batch.axes)
        held = {var: axis for index, axis in axes.items() if jx.is_var(var := split.scan.invars[index])}
        # The rules have to split the experts of each of them, which come after the dim of layers.
        fits = all(v in split.weights and v in split.like and axis in parameters[split.like[v]].dims[1] for v, axis in held.items())
        if not held or not fits:
            return split, {}
        scan = split.scan.replace(params={**split.scan.params, "jaxpr": local})
        return replace(split, scan=scan), held

    def _stored(self, pipelined: Pipelined, parameters: Sequence[ParameterPlace], places: Sequence[tuple[Dims, Dims]]) -> StoredCall | None:
        """The same call with its stacks stored on their stages; None if they cannot be, or need not be."""
        split, chunks, axis = pipelined.split, pipelined.chunks, self.pipeline.axis
        if chunks.are_neighbours or any(parameters[index].dims[0] for index in split.stacks) or not pipelined.can_be_stored():
            return None
        on_stages = [(stored_dims(a, axis), stored_dims(b, axis)) if i in split.stacks else (a, b) for i, (a, b) in enumerate(places)]
        dims = {var: on_stages[index][0] for var, index in split.like.items()}
        there = replace(pipelined, moves=replace(pipelined.moves, dims=dims, is_stored=True))
        paths = frozenset(parameters[i].path for i in split.stacks)

        def form_of(place: ParameterPlace) -> Form | None:
            return stored_form(place, chunks, axis) if place.path in paths else None

        return StoredCall(form_of=form_of, run=self._run_of(there, on_stages))

    def _run_of(self, pipelined: Pipelined, places: Sequence[tuple[Dims, Dims]]) -> Run:
        """A function that runs a pipelined call. places: the dims of each parameter and of its gradient."""

        def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            # Not strict: the inputs follow the parameters in `arrays`.
            params = [self._pinned(x, *dims) for x, dims in zip(arrays, places, strict=False)]
            others = [self._pinned(x, dims, dims) for x, dims in zip(arrays[len(places) :], self.batch.dims, strict=True)]
            return pipelined(params, others)

        return run

    def _pinned(self, x: jax.Array, forward: Dims, backward: Dims) -> jax.Array:
        """A value constrained to one layout, and its gradient to another."""
        value, cotangent = (NamedSharding(self.site.mesh, partition_spec(dims)) for dims in (forward, backward))
        return constrain(x, value, cotangent)
