"""A loss with a pipeline inside: traced, split, placed and run; the join of rules, mesh and jgt/pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt import jaxpr as jx
from jgt.document import InputError, nearest
from jgt.jaxpr import Place, Program, Var
from jgt.microbatches import find_microbatches
from jgt.pipeline.config import Pipeline
from jgt.pipeline.custom import find_table
from jgt.pipeline.ends import Input, Rewrite
from jgt.pipeline.layout import Dims, Layout
from jgt.pipeline.run import Executor
from jgt.pipeline.schedule import Table
from jgt.pipeline.split import Split, SplitError, split
from jgt.placement import ParameterPlace
from jgt.rewrite import Rewriter, partition_spec
from jgt.rules import Matcher, Rules


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A split program with all that running it takes. param_dims: axes of each dim of each parameter."""

    split: Split
    table: Table
    pipeline: Pipeline
    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]
    inputs: Sequence[Input]
    param_dims: Sequence[Dims]
    rewrite: Rewrite

    def __call__(self, params: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The function's results. Differentiable by the parameters, through the first result."""

        @jax.custom_vjp
        def run(params: list[Any], inputs: list[Any]) -> list[Any]:
            return self._evaluate(params, inputs)

        def forward(params: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            _refuse([x.perturbed for x in inputs])
            return self._train([p.value for p in params], [x.value for x in inputs])

        def backward(gradients: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[None]]:
            first, *others = cotangents
            if not all(isinstance(c, SymbolicZero) for c in others):
                raise ValueError("a pipelined function has a gradient through its first result only: return the loss first, and (loss, aux) with has_aux=True")
            return [None if g is None else _scaled(g, first) for g in gradients], [None] * len(inputs)

        run.defvjp(forward, backward, symbolic_zeros=True)
        # Nested shard_maps need to be compiled, also where the caller does not.
        return jax.jit(run)(list(params), list(inputs))

    def _executor(self) -> Executor:
        dims = {var: self.param_dims[index] for var, index in self.split.like.items()}
        layout = Layout(mesh=self.mesh, axis=self.pipeline.axis, batch_axes=self.batch_axes, dims=dims)
        options = self.pipeline
        return Executor(
            split=self.split, layout=layout, inputs=self.inputs, rewrite=self.rewrite, remat=options.remat, gather=options.gather
        )

    def _here(self, part: Any) -> Any:
        return part.changed(lambda p: self.rewrite(p, Place()))

    def _statistics(self, inputs: list[Any]) -> list[Any]:
        return self._part(self._here(self.split.before), [], inputs, full=True)

    def _part(self, part: Any, params: list[Any], inputs: list[Any], *, full: bool, more: dict[Var, Any] | None = None) -> list[Any]:
        names = self.split.full_arguments if full else self.split.arguments
        known = dict(zip(names, [*(params or [None] * len(self.param_dims)), *inputs], strict=True)) | (more or {})
        return part([known[v] for v in part.inputs])

    def _evaluate(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        split = self.split
        shared = dict(zip(split.shared.outputs, self._part(self._here(split.shared), params, inputs, full=False), strict=True))
        weights, common = [shared[v] for v in split.weights], [shared[v] for v in split.common]
        totals = self._executor().evaluate(self.table, weights, common, inputs, self._statistics(inputs))
        return self._after(totals, params, inputs)

    def _after(self, totals: Sequence[Any], params: list[Any], inputs: list[Any]) -> list[Any]:
        more = dict(zip(self.split.after_totals, totals, strict=True))
        return self._part(self._here(self.split.after), params, inputs, full=True, more=more)

    def _train(self, params: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and the gradients of the first one by the parameters."""
        split = self.split
        which = [jnp.issubdtype(p.dtype, jnp.floating) for p in params]

        def merged(floats: Sequence[Any]) -> list[Any]:
            left = iter(floats)
            return [next(left) if f else p for f, p in zip(which, params, strict=True)]

        def shared(floats: list[Any]) -> tuple[list[Any], list[Any]]:
            found = self._part(self._here(split.shared), merged(floats), inputs, full=False)
            return _floats(found), found

        floats = _floats(params)
        _, back, found = jax.vjp(shared, floats, has_aux=True)
        values = dict(zip(split.shared.outputs, found, strict=True))
        weights, common = [values[v] for v in split.weights], [values[v] for v in split.common]
        seeds = self._seeds(params, inputs)
        results = self._executor().train(self.table, weights, common, inputs, self._statistics(inputs), seeds)

        def after(floats: list[Any]) -> tuple[Any, list[Any]]:
            found = self._after(results.totals, merged(floats), inputs)
            return found[0], found

        loss, direct, outputs = jax.vjp(after, floats, has_aux=True)
        by_var: dict[Var, Any] = {}
        for variables, gradients in ((split.weights, results.weights), (split.common, results.common)):
            kept = [v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.floating)]
            for var, gradient in zip(kept, gradients, strict=True):
                by_var[var] = gradient if var not in by_var else by_var[var] + gradient
        cotangents = [by_var[v] for v in split.shared.outputs if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        pipelined, own = back(cotangents)[0], direct(jnp.ones_like(loss))[0]
        gradients = iter([a + b for a, b in zip(pipelined, own, strict=True)])
        return outputs, [next(gradients) if f else None for f in which]

    def _seeds(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        """The derivative of the first result by each total, which must not depend on the totals: they are not known yet."""
        split = self.split
        shapes = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in split.after_totals]
        which = [jnp.issubdtype(t.dtype, jnp.floating) for t in shapes]

        def loss(floats: list[Any], others: list[Any]) -> Any:
            a, b = iter(floats), iter(others)
            return self._after([next(a) if f else next(b) for f in which], params, inputs)[0]

        floats = [t for t, f in zip(shapes, which, strict=True) if f]
        others = [t for t, f in zip(shapes, which, strict=True) if not f]
        if jx.depends(jax.grad(loss), floats, others):
            raise ValueError(
                "the loss is not linear in what it sums up over the batch, so the backward pass of the first microbatch would need the loss of the last. "
                "Return a sum or a (weighted) mean over the batch, and take functions of it outside"
            )
        found = iter(jax.grad(loss)(floats, others))
        return [next(found) if f else jnp.zeros((), jnp.float32) for f in which]


@dataclass(frozen=True, kw_only=True)
class PipelinedCall:
    """A call whose layers a pipeline runs: its parameters' places, and how to run it on the arguments' arrays."""

    parameters: tuple[ParameterPlace, ...]
    run: Callable[[Sequence[Any]], list[Any]]


def pipelined_call(
    call: Any, program: Program, pipeline: Pipeline, rules: Rules, mesh: Mesh | AbstractMesh, parameters: tuple[ParameterPlace, ...], problems: list[str]
) -> PipelinedCall | None:
    """Splits a call by its pipeline; None with `problems` added where that is impossible."""
    before = len(problems)
    num_params = len(parameters)
    sizes = dict(mesh.shape)
    found = find_microbatches(call.named[num_params:], rules, sizes, lambda index: jx.is_random_key(program, num_params + index))
    problems += found.problems
    if pipeline.axis not in sizes:
        problems.append(pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {nearest(pipeline.axis, sizes)}"))
        return None
    if jx.mesh_around() is not None or jx.vmapped_axes():
        raise ValueError("a pipelined function cannot stand inside shard_map, or a vmap over a mesh axis; put them inside of it")
    if pipeline.axis in found.axes:
        problems.append(pipeline.problem("axis", f"the inputs are sharded over {pipeline.axis}. Take it out of inputs: and batch"))
    problems += found.division_problems(pipeline)
    late = [axis for axis in found.axes if list(sizes).index(axis) > list(sizes).index(pipeline.axis)]
    if late:
        # XLA wants the manual axes of shard_maps inside each other in the order of the mesh.
        problems.append(
            pipeline.problem("axis", f"in the mesh {pipeline.axis} must come after {', '.join(late)}, over which the batch is split. "
            "Where devices are placed may stay: jgt.make_mesh(sizes, axis_names=...)")
        )
    num_stages = sizes[pipeline.axis]
    table = None
    try:
        table = find_table(pipeline.schedule, num_stages, pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    except InputError as error:
        problems += error.problems
    if len(problems) > before or table is None:
        return None
    batched = [False] * num_params + [i.kind == "rows" for i in found.inputs]
    keys = [num_params + index for index, one in enumerate(found.inputs) if one.kind == "key"]
    rows = found.num_rows // (pipeline.microbatches * found.num_shards)

    def trace(num_rows: int) -> Program:
        try:
            return call.trace_rows(batched, num_rows)
        except Exception as error:
            names = ", ".join(name for name, kind in zip(found.names, found.inputs, strict=True) if kind.kind == "rows")
            raise SplitError(
                f"with {num_rows} instead of {found.num_rows} rows in {names} the function fails: {str(error).splitlines()[0]}. "
                "If one of them is not the batch, give it the rule [] under inputs:"
            ) from error

    try:
        micro = program if rows == found.num_rows else trace(rows)
        larger, ratio = (micro, rows / found.num_rows) if 1 < rows < found.num_rows else (trace(2 * found.num_rows), 2.0)
        cut = split(micro, program, larger, ratio=ratio, signal=pipeline.signal, num_params=num_params, keys=keys, trusted=pipeline.per_microbatch)
    except SplitError as error:
        problems.append(pipeline.problem("signal", str(error)))
        return None
    if table.num_chunks > cut.num_layers:
        held = f"{num_stages} stages" if table.virtual == 1 else f"{num_stages} stages with {table.virtual} chunks each"
        problems.append(
            pipeline.problem("signal", f"{pipeline.signal!r} has {cut.num_layers} layer{'s' * (cut.num_layers != 1)}, too few for {held}. Make {pipeline.axis} or virtual smaller")
        )
        return None
    parameters = _staged_places(parameters, cut, pipeline.axis, num_stages)

    def rewrite(program: Program, place: Place) -> Program:
        return Rewriter(Matcher(rules), mesh).rewrite_part(program, place)

    pipelined = Pipelined(
        split=cut,
        table=table,
        pipeline=pipeline,
        mesh=mesh,
        batch_axes=found.axes,
        inputs=found.inputs,
        param_dims=[p.dims for p in parameters],
        rewrite=rewrite,
    )

    def run(arrays: Sequence[Any]) -> list[Any]:
        params = [_pinned(x, p.dims, p.optimizer_dims, mesh) for x, p in zip(arrays, parameters, strict=False)]
        inputs = [_pinned(x, dims, dims, mesh) for x, dims in zip(arrays[num_params:], found.dims, strict=True)]
        return pipelined(params, inputs)

    return PipelinedCall(parameters=parameters, run=run)


def _pinned(x: Any, forward: Dims, backward: Dims, mesh: Mesh | AbstractMesh) -> Any:
    """A value with its sharding, and its gradient with another."""
    ahead, behind = (NamedSharding(mesh, partition_spec(dims)) for dims in (forward, backward))
    pin = jax.lax.with_sharding_constraint
    if ahead == behind:
        return pin(x, ahead)
    identity = jax.custom_vjp(lambda x: pin(x, ahead))
    identity.defvjp(lambda x: (pin(x, ahead), None), lambda _, g: (pin(g, behind),))
    return identity(x)


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


def _floats(values: Sequence[Any]) -> list[Any]:
    return [v for v in values if jnp.issubdtype(v.dtype, jnp.floating)]


def _scaled(gradient: Any, by: Any) -> Any:
    return jnp.zeros_like(gradient) if isinstance(by, SymbolicZero) else gradient * by.astype(gradient.dtype)


def _refuse(perturbed: Sequence[bool]) -> None:
    if any(perturbed):
        raise ValueError("a pipelined function has gradients by its first argument, the parameters, only")
