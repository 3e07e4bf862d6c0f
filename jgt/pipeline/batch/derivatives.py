"""The derivatives that jax.custom_jvp and jax.custom_vjp functions bring along: what they must be for a batch that is split.

A custom derivative may be any code: one that clips the gradient of a weight, or subtracts its mean over the batch, gives another result for
every split. So the backward pass of such a call is traced, and its values are followed like the values of the program. Each cotangent has a
known extent (`cotangent_extent`), and each gradient must come out with the extent that a true derivative has (`is_gradient_extent`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax

from jgt.pipeline.batch.extent import Extent
from jgt.pipeline.batch.rows import Rows
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.jaxpr import Equation, Program
from jgt.program.tracing import evaluate, trace

_PullBack = Callable[[list[jax.Array]], tuple[list[jax.Array]]]
"""jax.vjp returns this for a function of one list: it maps cotangents to the gradients of that list."""


def backward_program(equation: Equation) -> Program:
    """The backward pass of one equation: its operands and the cotangents of its real results → the gradients of its real operands.

    Literals are not operands of it, and results that are never used have no cotangent.
    """
    # An operand that occurs twice has one gradient, which is the sum over both places.
    invars = list(dict.fromkeys(a for a in equation.invars if jx.is_var(a)))
    outvars = [v for v in equation.outvars if not jx.is_dropped(v)]
    is_real = [jx.is_real(v) for v in invars]
    # The program inside lends the new one its class and its debug info, and nothing of its content.
    program = jx.program_of(next(subprograms(equation)), invars, [equation], outvars)

    def backward(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        def forward(reals: list[jax.Array]) -> list[jax.Array]:
            remaining = iter(reals)
            results = evaluate(program, [next(remaining) if real else x for real, x in zip(is_real, operands, strict=True)])
            return [x for x, v in zip(results, outvars, strict=True) if jx.is_real(v)]

        reals = [x for real, x in zip(is_real, operands, strict=True) if real]
        pull_back = cast(_PullBack, jax.vjp(forward, reals)[1])
        return pull_back(cotangents)[0]

    return trace(backward, [v.aval for v in invars], [v.aval for v in outvars if jx.is_real(v)])[0]


def cotangent_extent(result: Extent) -> Extent:
    """The extent of the cotangent of a value with this extent.

    The loss is a sum over the microbatches, so it has degree 1, and so has the sum of a value times its cotangent. Hence the
    cotangent of a number of degree d has degree 1 - d: the gradient of a weight (d = 0) is a sum over the batch. The cotangent
    of a value with rows has degree -d, because the sum over the rows adds the missing 1.
    """
    if result.rows:
        return Extent(Rows(result.rows.dim, result.rows.copies), -result.degree)
    # The gradient of a weight is made of rows. The cotangent of a sum over rows is a constant, because the loss is
    # linear in it.
    return Extent(None, 1 - result.degree, not result.of_batch)


def is_gradient_extent(gradient: Extent, operand: Extent) -> bool:
    """Whether a gradient has the extent of a derivative by this operand, so that gradients of microbatches add up."""
    if gradient.rows and operand.rows:
        # Copies have to agree, unless the rows of one side are all equal (0): those fit any order.
        is_in_place = gradient.rows.dim == operand.rows.dim and gradient.rows.copies in (0, operand.rows.copies or gradient.rows.copies)
        return is_in_place and gradient.degree == -operand.degree
    return gradient.rows is operand.rows and gradient.exact and gradient.degree == 1 - operand.degree
