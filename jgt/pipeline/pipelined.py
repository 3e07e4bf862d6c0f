"""A loss with a pipeline inside, as a function with a custom derivative.

Forward and backward passes of different microbatches are interleaved, so the gradient cannot come from JAX's transposition of the forward
pass: one loop computes loss and gradients together. `jax.custom_vjp` hides that from the caller. Its forward rule runs the whole training
loop and returns the gradients as residuals; its backward rule multiplies them by the cotangent of the loss. Without differentiation only
the forward passes run.

The loss is split into a beginning (`shared`), the pipeline, and an end (`after`). With loss = after(totals(shared(params)), params), the
gradient is

    shared's vjp of (the pipeline's gradients with seeds d after / d totals)  +  d after / d params

The loop needs the seeds before it knows the totals, so `after` must be linear in them; sums and weighted means are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jgt.document import InputError
from jgt.pipeline.arrays import Arrays, Floats, call, has_gradient, vjp
from jgt.pipeline.executor import Executor
from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.dataflow import nonlinear_source, result_depends_on
from jgt.program.jaxpr import Atom, Var
from jgt.program.parts import Part, dependency_bits, flatten
from jgt.program.places import Place

_Gradients = tuple[list[jax.Array | None], list[None]]
"""By the parameters that the caller differentiates by, and by the inputs, which have none."""

_ELEMENTWISE = ("convert_element_type", "copy", "name")
"""Equations that mean the same for any shape."""


@dataclass(frozen=True, kw_only=True)
class Pipelined(Executor):
    """A loss with its pipeline."""

    def __call__(self, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> Arrays:
        """The function's results. Differentiable by the parameters, through the first result."""
        return self._run(list(params), list(inputs))

    @functools.cached_property
    def _run(self) -> Callable[[Arrays, Arrays], Arrays]:
        """A call, compiled: nested shard_maps have to be, even if the caller does not use jit. Eager calls share one compilation."""

        @jax.custom_vjp
        def run(params: Arrays, inputs: Arrays) -> Arrays:
            return self._evaluate(params, inputs)

        # JAX wraps each argument with a flag, whether it is differentiated, because of `symbolic_zeros`.
        def forward(params: list[Any], inputs: list[Any]) -> tuple[Arrays, _Gradients]:
            if any(x.perturbed for x in inputs):
                raise ValueError("a pipelined function has gradients only by its first argument, the parameters")
            trained = Floats(tuple(p.perturbed and has_gradient(p.value) for p in params))
            of_call = replace(self, split=replace(self.split, frozen=self._frozen(trained)))
            results, gradients = of_call._train([p.value for p in params], [x.value for x in inputs], trained)
            return results, (gradients, [None] * len(inputs))

        def backward(residuals: _Gradients, cotangents: list[jax.Array | SymbolicZero]) -> _Gradients:
            by_params, by_inputs = residuals
            first, *others = cotangents
            if not all(isinstance(c, SymbolicZero) for c in others):
                raise ValueError(
                    "a pipelined function has a gradient through its first result only: "
                    "return the loss first, and (loss, aux) with has_aux=True"
                )
            if isinstance(first, SymbolicZero):
                return [None if g is None else jnp.zeros_like(g) for g in by_params], by_inputs
            return [None if g is None else g * first.astype(g.dtype) for g in by_params], by_inputs

        run.defvjp(forward, backward, symbolic_zeros=True)
        return jax.jit(run)

    def _evaluate(self, params: Arrays, inputs: Arrays) -> Arrays:
        shared = self._shared(params, inputs)
        with scopes.pipeline():
            totals, _ = self.run(shared, inputs, self._statistics(inputs))
        return self._after(totals, params, inputs)

    def _train(self, params: Arrays, inputs: Arrays, which: Floats) -> tuple[Arrays, list[jax.Array | None]]:
        """The results, and the gradients of the first one by some of the parameters; None for the others."""
        outputs = [v for v in self.split.shared.outputs if jx.is_var(v)]

        def merged(floats: Arrays) -> Arrays:
            return which.merge(floats, which.others(params))

        def shared(floats: Arrays) -> tuple[Arrays, Arrays]:
            values = self._shared(merged(floats), inputs)
            return self.split.floats(outputs).select(values), values

        floats = which.select(params)
        _, shared_derivative, values = vjp(shared, floats)
        # The order is fixed from here: seeds before the loop, which needs them, and the end after it, which needs totals.
        seeds = self._seeds(params, inputs)
        with scopes.pipeline():
            totals, gradients = self.run(values, inputs, self._statistics(inputs), seeds)

        def after(floats: Arrays) -> tuple[jax.Array, Arrays]:
            results = self._after(totals, merged(floats), inputs)
            return results[0], results

        loss, after_derivative, results = vjp(after, floats)
        # A value that layers scan over and that is used elsewhere as well has two gradients, which add up.
        by_var: dict[Atom, jax.Array] = {}
        for var, gradient in gradients:
            by_var[var] = gradient if var not in by_var else by_var[var] + gradient
        cotangents = [by_var[v] for v in self.split.differentiated(outputs)]
        through_pipeline, direct = shared_derivative(cotangents)[0], after_derivative(jnp.ones_like(loss))[0]
        total = [a + b for a, b in zip(through_pipeline, direct, strict=True)]
        return results, which.merge(total, [None] * len(which.others(params)))

    def _frozen(self, trained: Floats) -> frozenset[Var]:
        """The weights and common values that are made of other parameters than the trained ones."""
        shared = self.split.shared
        flat, sources = flatten(shared.program), set(trained.select(self.split.arguments[: len(trained.which)]))
        # Not strict: the program's constants follow.
        marks = {argument: 1 for argument, var in zip(flat.invars, shared.inputs, strict=False) if var in sources}
        reached = dependency_bits(flat, marks)
        made = zip(shared.outputs, flat.outvars, strict=True)
        return frozenset(v for v, a in made if jx.is_var(v) and jx.is_var(a) and not reached.get(a))

    def _seeds(self, params: Arrays, inputs: Arrays) -> Arrays:
        """The derivative of the first result by each total, which must not depend on the totals: they are not known yet."""
        totals = [jnp.zeros(jx.shape_of(v), jx.dtype_of(v)) for v in self.split.after_totals]
        which = Floats.among(totals)

        def loss(floats: Arrays, others: Arrays) -> jax.Array:
            return self._after(which.merge(floats, others), params, inputs)[0]

        floats, others = which.select(totals), which.others(totals)
        # Linear in the totals means that the derivative by them does not depend on them: the traced gradient shows it. Nor may it depend on
        # totals that are whole numbers, such as a count that divides the loss.
        gradient = cast("Callable[[Arrays, Arrays], Arrays]", jax.grad(loss))
        if result_depends_on(lambda totals, _: gradient(*totals), (floats, others), ()):
            where = nonlinear_source(self.split.after, self.split.after_totals)
            problem = (
                f"{where}{': ' if where else ''}the loss is not linear in what it sums up over the batch, "
                "so the backward pass of the first microbatch would need the loss of the last. "
                "Return a sum or a (weighted) mean over the batch, and take functions of it outside"
            )
            raise InputError([self.pipeline.problem("signal", problem)])
        # The executor ignores the seeds of counts. They only keep the list in the order of the totals.
        return which.merge(gradient(floats, others), [jnp.zeros((), jnp.float32)] * len(others))

    # -- the parts of the program that run outside of the pipeline ----------------------------------------------------------

    def _shared(self, params: Arrays, inputs: Arrays) -> Arrays:
        """The weights and common values, from the parameters. The part reads no inputs."""
        split = self.split
        return call(self._rewritten_shared, dict(zip(split.arguments, [*params, *inputs], strict=True)))

    def _statistics(self, inputs: Arrays) -> Arrays:
        split = self.split
        names = split.full_arguments[len(split.full_arguments) - len(inputs) :]
        return call(self._rewritten(split.before), dict(zip(names, inputs, strict=True)))

    def _after(self, totals: Arrays, params: Arrays, inputs: Arrays) -> Arrays:
        """The function's results."""
        split = self.split
        known = dict(zip([*split.full_arguments, *split.after_totals], [*params, *inputs, *totals], strict=True))
        return call(self._rewritten(split.after), known)

    def can_be_stored(self) -> bool:
        """Whether the stacked weights may be stored on their stages.

        They may if the layers alone read them, and they are cast at most: then they may have other dims for the layers.
        """
        cut, shared = self.split, self._rewritten_shared.program
        by_param = {cut.like[v]: v for v in cut.weights if v in cut.like}
        if len(by_param) < len(cut.weights) or any(cut.full_arguments[index] in cut.after.inputs for index in by_param):
            return False
        program = jx.body(shared)
        arguments = dict(zip(cut.shared.inputs, program.invars, strict=False))
        # Along each stack: the parameter, and what casts make of it.
        along = {arguments[cut.arguments[index]]: var for index, var in by_param.items()}
        for equation in program.eqns:
            read = [a for a in equation.invars if jx.is_var(a) and a in along]
            if read and equation.primitive.name not in _ELEMENTWISE:
                return False
            along |= {var: along[a] for a in read for var in equation.outvars}
        return all(along.get(made, out) is out for made, out in zip(program.outvars, cut.shared.outputs, strict=True) if jx.is_var(made))

    @property
    def _rewritten_shared(self) -> Part:
        return self.split.shared.changed(self.rewrite_shared)

    def _rewritten(self, part: Part) -> Part:
        return part.changed(lambda program: self.rewrite(program, Place()))
