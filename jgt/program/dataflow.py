"""Questions about how values flow through a program: what an output is made of, and where random numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jgt.program import jaxpr as jx
from jgt.program.equations import map_subprograms, outer_operands, outer_results, part_for, separate, subprograms
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.parts import Flat, Part, dependency_bits, flatten
from jgt.program.places import source_of
from jgt.program.tracing import evaluate, trace

_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
    "igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max "
    "min mul mulhi name ne neg nextafter not one_minus_square or pcast polygamma polynomial population_count pow pvary "
    "random_clone random_fold_in random_gamma real reduce_precision regularized_incomplete_beta rem reshard round rsqrt "
    "select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh threefry2x32 xor zeta"
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""The primitives that JAX batches as elementwise. Operands have the rank of the result, or 0; their sizes are those of the result, or 1."""


def live(program: Program) -> Program:
    """The program without equations that no output needs, as XLA runs it: gradients that nobody reads, in loops too."""
    inner = jx.body(program)
    needed, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    # JAX does not look into the bodies of while loops.
    eqns = [map_subprograms(e, live) if "cond_jaxpr" in e.params else e for e in needed.eqns]
    return jx.with_body(program, eqns=eqns, outvars=needed.outvars)


def unchanged_arguments(program: Program) -> list[int | None]:
    """The index of the argument that each output of a program is, unchanged; None for an output that was computed.

    An argument may pass through jits, checkpoints, loops and branches on its way, if all of them return it as they got it.
    """
    inner = jx.body(program)
    origin = {var: index for index, var in enumerate(inner.invars)}
    for equation in inner.eqns:
        # Some programs, such as the condition of a while loop, make none of the results.
        makers = [p for p in subprograms(equation) if outer_results(equation, p) == equation.outvars]
        returned = [_unchanged_operands(equation, p) for p in makers]
        for out, *atoms in zip(equation.outvars, *returned, strict=True):
            # Every branch of a cond has to return the same operand.
            if atoms and all(a is not None and a is atoms[0] and a in origin for a in atoms):
                origin[out] = origin[atoms[0]]
    return [origin.get(atom) if jx.is_var(atom) else None for atom in inner.outvars]


def _unchanged_operands(equation: Equation, program: Program) -> list[Var | None]:
    operands = outer_operands(equation, program)
    atoms = [None if index is None else operands[index] for index in unchanged_arguments(program)]
    return [a if a is not None and jx.is_var(a) else None for a in atoms]


def result_depends_on(fn: Callable[[Any, Any], Any], args: Any, others: Any) -> bool:
    """Whether any result of fn(args, others) depends on an array of `args`."""
    # A jit counts as one equation: each of its results depends on all of its operands.
    flat = flatten(trace(fn, args, others)[0], dissolve=lambda _: False)
    reached = dependency_bits(flat, dict.fromkeys(flat.invars[: len(jax.tree.leaves(args))], 1))
    return any(jx.is_var(a) and reached.get(a) for a in flat.outvars)


def nonlinear_source(part: Part, variables: Collection[Var]) -> str:
    """The user's file:line of the first step from these inputs of a part to its first output that is not linear in them; or empty."""
    flat = flatten(part.program)
    given = {var: 1 for own, var in zip(part.inputs, flat.invars, strict=False) if own in variables}
    reached = dependency_bits(flat, given)
    needed: set[Var] = {a for a in flat.outvars[:1] if jx.is_var(a)}
    for equation in reversed(flat.eqns):
        if own := part_for(equation, needed):
            needed.update(a for a in own.invars if jx.is_var(a))
    for equation in flat.eqns:
        operands = list(dict.fromkeys(a for a in equation.invars if jx.is_var(a)))
        by = [a for a in operands if reached.get(a) and jx.is_real(a)]
        if by and any(v in needed for v in equation.outvars) and not _is_linear(flat, equation, by, [a for a in operands if a not in by]):
            return source_of(equation)
    return ""


def _is_linear(flat: Flat, equation: Equation, by: Sequence[Var], others: Sequence[Var]) -> bool:
    """Whether the derivative of an equation's results by some of its operands does not depend on these."""
    results = [v for v in equation.outvars if not jx.is_dropped(v) and jx.is_real(v)]
    program = jx.program_of(flat.program, [*by, *others], [equation], results)

    def tangents(primals: Sequence[jax.Array], fixed: Sequence[jax.Array]) -> Any:
        def results_of(*xs: jax.Array) -> list[jax.Array]:
            return evaluate(program, [*xs, *fixed])

        return jax.jvp(results_of, tuple(primals), tuple(jnp.ones_like(x) for x in primals))[1]

    return not result_depends_on(tangents, [jx.struct_of(a) for a in by], [jx.struct_of(a) for a in others])


def is_random_key(program: Program, index: int) -> bool:
    """Whether a program draws random numbers from its argument `index`: whether it turns the argument's bits into a key."""
    # A typed key (jax.random.key) is wrapped; an old-style one (jax.random.PRNGKey) goes into the generator as it is.
    return _reaches(program, index, lambda e: e.primitive.name in ("random_wrap", "threefry2x32"), lambda outer, inner: False)


def is_scanned(program: Program, index: int) -> bool:
    """Whether a scan goes over a program's argument `index`, or over something made of it."""
    # A scan takes the first dim off what it goes over.
    return _reaches(program, index, lambda e: False, lambda outer, inner: len(jx.shape_of(outer)) > len(jx.shape_of(inner)))


def _reaches(program: Program, index: int, is_end: Callable[[Equation], bool], is_end_inside: Callable[[Var, Var], bool]) -> bool:
    """Whether an argument, or anything made of it, is an operand of some equation.

    is_end: whether an equation is one of these. is_end_inside: the same of an operand and the argument of an inner program that gets it.
    """
    # Splitting or reshaping the bits of a key, say: whatever is made of them may become a key later.
    reached = {jx.body(program).invars[index]}
    for equation in jx.body(program).eqns:
        if not any(jx.is_var(a) and a in reached for a in equation.invars):
            continue
        if is_end(equation):
            return True
        for inner in subprograms(equation):
            for i, (outer, var) in enumerate(zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True)):
                if outer is None or not jx.is_var(outer) or outer not in reached:
                    continue
                if is_end_inside(outer, var) or _reaches(inner, i, is_end, is_end_inside):
                    return True
        for part in separate(equation):
            if any(jx.is_var(a) and a in reached for a in part.invars):
                reached.update(part.outvars)
    return False


def random_draws(equation: Equation) -> Iterator[Var]:
    """The variables of the random bits that an equation draws, including those in programs inside it."""
    if equation.primitive.name in ("random_bits", "threefry2x32", "rng_bit_generator", "random_gamma"):
        yield from equation.outvars
    for program in subprograms(equation):
        for inner in jx.body(program).eqns:
            yield from random_draws(inner)
