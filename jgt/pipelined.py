"""A loss with a pipeline inside, as a function with a derivative of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh

from jgt import jaxpr as jx
from jgt import scopes
from jgt.jaxpr import Place, Var
from jgt.pipeline.config import Pipeline
from jgt.pipeline.ends import Input, Rewrite
from jgt.pipeline.floats import Floats, float_variables
from jgt.pipeline.layout import Dims, Layout
from jgt.pipeline.run import Executor
from jgt.pipeline.schedule import Table
from jgt.pipeline.split import Split


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A split program with all that running it takes.

    param_dims: axes of each dim of each parameter; param_signals: the region that each one is used in.
    """

    split: Split
    table: Table
    pipeline: Pipeline
    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]
    inputs: Sequence[Input]
    param_dims: Sequence[Dims]
    param_signals: Sequence[tuple[str, ...]]
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
        signals = {var: self.param_signals[index] for var, index in self.split.like.items()}
        layout = Layout(mesh=self.mesh, axis=self.pipeline.axis, batch_axes=self.batch_axes, dims=dims, signals=signals)
        options = self.pipeline
        return Executor(
            split=self.split,
            layout=layout,
            inputs=self.inputs,
            rewrite=self.rewrite,
            remat=options.remat,
            gather=options.gather,
            skips=options.idle == "skip" if options.idle else layout.on_cpu and not layout.axes_inside,
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
        with scopes.pipeline():
            totals = self._executor().evaluate(self.table, weights, common, inputs, self._statistics(inputs))
        return self._after(totals, params, inputs)

    def _after(self, totals: Sequence[Any], params: list[Any], inputs: list[Any]) -> list[Any]:
        more = dict(zip(self.split.after_totals, totals, strict=True))
        return self._part(self._here(self.split.after), params, inputs, full=True, more=more)

    def _train(self, params: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and the gradients of the first one by the parameters."""
        split = self.split
        which = Floats.among(params)

        def merged(floats: Sequence[Any]) -> list[Any]:
            return which.merge(floats, which.leave(params))

        def shared(floats: list[Any]) -> tuple[list[Any], list[Any]]:
            found = self._part(self._here(split.shared), merged(floats), inputs, full=False)
            return Floats.among(found).take(found), found

        floats = which.take(params)
        _, back, found = jax.vjp(shared, floats, has_aux=True)
        values = dict(zip(split.shared.outputs, found, strict=True))
        weights, common = [values[v] for v in split.weights], [values[v] for v in split.common]
        seeds = self._seeds(params, inputs)
        with scopes.pipeline():
            results = self._executor().train(self.table, weights, common, inputs, self._statistics(inputs), seeds)

        def after(floats: list[Any]) -> tuple[Any, list[Any]]:
            found = self._after(results.totals, merged(floats), inputs)
            return found[0], found

        loss, direct, outputs = jax.vjp(after, floats, has_aux=True)
        by_var: dict[Var, Any] = {}
        for variables, gradients in ((split.weights, results.weights), (split.common, results.common)):
            for var, gradient in zip(float_variables(variables), gradients, strict=True):
                by_var[var] = gradient if var not in by_var else by_var[var] + gradient
        cotangents = [by_var[v] for v in float_variables(split.shared.outputs)]
        pipelined, own = back(cotangents)[0], direct(jnp.ones_like(loss))[0]
        gradients = [a + b for a, b in zip(pipelined, own, strict=True)]
        return outputs, which.merge(gradients, [None] * len(which.leave(params)))

    def _seeds(self, params: list[Any], inputs: list[Any]) -> list[Any]:
        """The derivative of the first result by each total, which must not depend on the totals: they are not known yet."""
        totals = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.split.after_totals]
        which = Floats.among(totals)

        def loss(floats: list[Any], others: list[Any]) -> Any:
            return self._after(which.merge(floats, others), params, inputs)[0]

        floats, others = which.take(totals), which.leave(totals)
        if jx.depends(jax.grad(loss), floats, others):
            raise ValueError(
                "the loss is not linear in what it sums up over the batch, so the backward pass of the first microbatch would need the loss of the last. "
                "Return a sum or a (weighted) mean over the batch, and take functions of it outside"
            )
        return which.merge(jax.grad(loss)(floats, others), [jnp.zeros((), jnp.float32)] * len(others))


def _scaled(gradient: Any, by: Any) -> Any:
    return jnp.zeros_like(gradient) if isinstance(by, SymbolicZero) else gradient * by.astype(gradient.dtype)


def _refuse(perturbed: Sequence[bool]) -> None:
    if any(perturbed):
        raise ValueError("a pipelined function has gradients by its first argument, the parameters, only")
