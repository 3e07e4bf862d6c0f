"""Devices add up the gradients of parameters: with fewer bytes for tables, in f32 for all matrices, and faster on CPUs.

Each device has a gradient of a whole parameter from its own rows of the batch, and devices add theirs up. JAX derives these sums, and XLA
places them. In three cases better ones exist, and this file writes them into a traced program before it is differentiated. Values stay.

- A table [v, d] whose rows are looked up. Where it is split over some of the axes that split the batch, a device needs its part of the
  sum alone. XLA sends that little if it sums over just the axes that split the result. Over more axes at once (a batch over data and
  fsdp, a table over fsdp) it gives every device the whole sum, of which each then takes its part: twice the bytes. So the devices'
  gradients stay apart as a dim of the array, [g, v, d], and are added up one axis after the other.
- With `wide_gradients`, a matmul or a lookup in bf16 leaves the parameter's gradient in f32, so that devices add up in f32. It is rounded
  once, to the parameter's type in the program, behind the sum.
- A matrix's gradient is the matmul of the rows that it multiplies with the cotangent of its result. XLA's CPU backend transposes the left
  operand, and fuses the operations that compute it into the transposed order, which is slow for a cotangent. JAX puts it there. If
  `reverse_mode` allows another derivative, the rows go there on CPUs.

b rows of the batch, v rows of a table, d its width, g groups: the devices that split the batch.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jgt.program import jaxpr as jx
from jgt.program.backward import map_backward
from jgt.program.dims import Dims
from jgt.program.equations import has_custom_derivative, is_call, is_remat, is_scan, map_subprograms, outer_operands, outer_results
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.parts import inlined
from jgt.program.places import Place, mesh_context
from jgt.program.tracing import result_of
from jgt.replacements.replacement import Replaced, Site
from jgt.rules import Rules

_KEEPS_DIMS = ("convert_element_type", "copy", "name", "sharding_constraint")
_Operands = tuple[jax.Array, jax.Array]


def sum_of_groups(x: jax.Array, groups: Sequence[int]) -> jax.Array:
    """[g, ...] → [...], in the type of x, in which it also travels.

    groups: the number of devices along each axis that splits the batch, outermost first.

    The last axis comes first: rules name the axes that split parameters last, and after such an axis less is left to send over the others.
    """
    return sum_of_parts(x.reshape(*groups or (1,), *x.shape[1:]), len(groups or (1,)))


def sum_of_parts(x: jax.Array, num_axes: int) -> jax.Array:
    """The sum over the first dims of an array, in its type, one mesh axis after the other.

    Of a sum over several axes at once, XLA makes an all-reduce, even if the result is split over one of them.
    """
    for dim in reversed(range(num_axes)):
        # Not by jnp.sum, which would widen bf16 to f32.
        x = jax.lax.reduce_sum(x, [dim])
        # Or XLA would make one sum of all.
        x = cast(jax.Array, jax.lax.optimization_barrier(x)) if dim else x
    return x


class SummedGradients:
    """A replacement by which devices add up the gradients of parameters.

    is_wide: whether they add up in f32. is_reverse: whether nobody differentiates the program forward.
    """

    def __init__(self, rules: Rules, *, is_wide: bool = False, is_reverse: bool = False):
        self._axes = rules.batch_axes
        self._is_wide, self._is_reverse = is_wide, is_reverse

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """See `Replacement`. The whole program of a call is changed at once, because only there it is known what is a parameter."""
        is_on_cpus = isinstance(site.mesh, Mesh) and site.mesh.devices.flat[0].platform == "cpu"
        # XLA has no reduce-scatter for CPUs. There, a sum for each axis only costs time.
        batch, rows_first = {} if is_on_cpus else self._batch(site), is_on_cpus and self._is_reverse
        derivatives = _Derivatives(batch, is_wide=self._is_wide, puts_rows_first=rows_first)
        if not site.is_whole or not (self._is_wide or rows_first or len(batch) > 1):
            return Replaced(program=program)
        arguments = jx.body(program).invars[: len(site.parameters)]
        known = {v: site.free(p.dims, ()) for v, p in zip(arguments, site.parameters, strict=True)}
        return Replaced(program=with_parameters_followed(program, known, derivatives.change))

    def _batch(self, site: Site) -> dict[str, int]:
        """The sizes of the mesh axes over which the partitioner splits the batch, outermost first."""
        (free,) = site.free((self._axes,), ())
        return {axis: size for axis in free if (size := site.sizes[axis]) > 1}


class _Derivatives:
    """Equations with other derivatives. batch: the sizes of the mesh axes that split the batch.

    puts_rows_first: whether the rows are the left operand of the matmul that makes a matrix's gradient.
    """

    def __init__(self, batch: Mapping[str, int], *, is_wide: bool, puts_rows_first: bool):
        self.batch, self._is_wide, self._puts_rows_first = batch, is_wide, puts_rows_first

    def change(self, equation: Equation, known: Mapping[Var, Dims]) -> list[Equation] | None:
        """The equations in the place of one that reads parameters; None for others."""
        is_read = [jx.is_var(a) and a in known for a in equation.invars]
        name = equation.primitive.name
        if name == "gather" and is_read[0]:
            return self._lookup(equation, known[cast(Var, equation.invars[0])])
        if name == "dot_general":
            return self._matmul(equation, is_read.index(True))
        if self._is_wide and has_custom_derivative(equation):
            return [map_backward(equation, _widened(is_read))]
        return None

    def _lookup(self, equation: Equation, table: Dims) -> list[Equation]:
        """The lookup of rows [b, ..., d] in a table, whose gradient is added up group by group."""
        split = {axis for axes in table for axis in axes}.intersection(self.batch)
        rows, numbers = jx.shape_of(equation.invars[1])[0], equation.params["dimension_numbers"]
        # A vmap of lookups has a table for each row, or one row for all.
        is_first = not {0} & {*numbers.offset_dims, *numbers.start_indices_batching_dims} and len(jx.shape_of(equation.invars[1])) > 1
        # One sum is as good where all axes of the batch split the table, or none does.
        is_apart = 0 < len(split) < len(self.batch) and is_first and rows % math.prod(self.batch.values()) == 0
        groups = tuple(self.batch.values()) if is_apart else ()
        dtype = jnp.float32 if self._is_wide and _is_narrow(equation.invars[0]) else jx.dtype_of(equation.invars[0])
        if not groups and dtype == jx.dtype_of(equation.invars[0]):
            return [equation]

        def backward(operands: _Operands, cotangent: jax.Array) -> tuple[jax.Array, None]:
            table, numbers = operands

            def added(numbers: jax.Array, cotangent: jax.Array) -> jax.Array:
                def look_up(table: jax.Array) -> jax.Array:
                    return result_of(equation, table, numbers)

                return _transposed(look_up, jax.ShapeDtypeStruct(table.shape, dtype), cotangent.astype(dtype))

            if not groups:
                return added(numbers, cotangent).astype(table.dtype), None
            # [b, ...] → [g, b / g, ...]
            by_group = (x.reshape(math.prod(groups), -1, *x.shape[1:]) for x in (numbers, cotangent))
            sums = jax.vmap(added)(*by_group)  # [g, v, d]
            return sum_of_groups(sums, groups).astype(table.dtype), None

        return _with_derivative(equation, backward)

    def _matmul(self, equation: Equation, read: int) -> list[Equation]:
        """The matmul whose operand of this number is a parameter, with another way to that parameter's gradient."""
        is_widened = self._is_wide and _is_narrow(equation.invars[read]) and _is_narrow(equation.outvars[0])
        if not (is_widened or self._puts_rows_first):
            return [equation]
        sides, result = _letters(equation)
        other, dtype = sides[1 - read], jnp.float32 if is_widened else None

        def backward(operands: _Operands, cotangent: jax.Array) -> tuple[jax.Array, ...]:
            weights, rows = operands[read], operands[1 - read]

            def product(rows: jax.Array) -> jax.Array:
                pair = (weights, rows) if read == 0 else (rows, weights)
                return result_of(equation, *pair)

            by_rows = _transposed(product, rows, cotangent)
            by_weights = jnp.einsum(f"{other},{result}->{sides[read]}", rows, cotangent, preferred_element_type=dtype)
            by_weights = by_weights.astype(weights.dtype)
            return (by_weights, by_rows) if read == 0 else (by_rows, by_weights)

        return _with_derivative(equation, backward)


def with_parameters_followed(
    program: Program, known: dict[Var, Dims], change: Callable[[Equation, Mapping[Var, Dims]], list[Equation] | None]
) -> Program:
    """The program in which equations that read parameters are changed, also in the calls, checkpoints and scans inside.

    known: the axes of the parameters among its arguments; casts of them are added. change: the equations in the place of one that reads
    such a variable; None leaves it, and follows the parameters into it.
    """
    eqns: list[Equation] = []
    for equation in jx.body(program).eqns:
        read = next((a for a in equation.invars if jx.is_var(a) and a in known), None)
        new = [equation] if read is None else change(equation, known)
        if new is None and read is not None and equation.primitive.name in _KEEPS_DIMS:
            known[equation.outvars[0]] = known[read]
        eqns += [_entered(equation, known, change)] if new is None else new
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)


def _entered(equation: Equation, known: dict[Var, Dims], change: Callable[..., list[Equation] | None]) -> Equation:
    """The equation with the programs inside changed."""
    if not (is_call(equation) or is_remat(equation) or is_scan(equation)):
        return equation

    def inside(inner: Program) -> Program:
        pairs = zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True)
        # A scan that goes over a stack of layers removes its first dim.
        own = {var: known[a][-len(jx.shape_of(var)) :] for a, var in pairs if a is not None and jx.is_var(a) and a in known}
        new = with_parameters_followed(inner, own, change)
        for outer, atom in zip(outer_results(equation, inner), jx.body(inner).outvars, strict=True):
            if outer is not None and jx.is_var(atom) and atom in own and not is_scan(equation):
                known[outer] = own[atom]
        return new

    return map_subprograms(equation, inside)


def _transposed(fn: Callable[[jax.Array], jax.Array], like: jax.Array | jax.ShapeDtypeStruct, cotangent: jax.Array) -> jax.Array:
    """The cotangent of the operand of a linear function. like: the operand, or its shape and type."""
    return cast("tuple[jax.Array]", jax.linear_transpose(fn, like)(cotangent))[0]


def _is_narrow(atom: jx.Atom) -> bool:
    return jx.is_real(atom) and jx.dtype_of(atom).itemsize < 4


def _letters(equation: Equation) -> tuple[tuple[str, str], str]:
    """The dims of the operands and of the result of a dot_general as einsum letters."""
    numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]] = equation.params["dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers
    free = iter(string.ascii_letters)
    a = [next(free) for _ in jx.shape_of(equation.invars[0])]
    of_left = dict(zip((*right, *right_batch), (*left, *left_batch), strict=True))
    b = [a[of_left[n]] if n in of_left else next(free) for n in range(len(jx.shape_of(equation.invars[1])))]
    shared = [a[n] for n in left_batch]
    alone = [x for x in a if x not in b] + [x for x in b if x not in a]
    return ("".join(a), "".join(b)), "".join(shared + alone)


def _widened(is_parameter: Sequence[bool]) -> Callable[[Program, list[int | None]], Program]:
    """A change of a backward rule: the matmuls that make the gradients of these operands leave them in f32, and are rounded behind that."""

    def change(program: Program, which: list[int | None]) -> Program:
        inner = jx.body(program)
        wide = [inner.outvars[n] for n, read in zip(which, is_parameter, strict=True) if read and n is not None]
        eqns: list[Equation] = []
        for equation in inner.eqns:
            is_sum = equation.primitive.name == "dot_general" and equation.outvars[0] in wide and _is_narrow(equation.outvars[0])
            eqns += _summed_in_f32(equation) if is_sum else [equation]
        return jx.with_body(program, eqns=eqns, outvars=inner.outvars)

    return change


def _summed_in_f32(equation: Equation) -> list[Equation]:
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        sums = result_of(equation, a, b, preferred_element_type=jnp.dtype(jnp.float32))
        return sums.astype(jx.dtype_of(equation.outvars[0]))

    program = jax.make_jaxpr(run)(*[jx.struct_of(a) for a in equation.invars])
    return inlined(program, equation, equation.invars, equation.outvars)


def _with_derivative(equation: Equation, backward: Callable[[_Operands, jax.Array], tuple[jax.Array | None, ...]]) -> list[Equation]:
    """The equation of two operands with this backward rule."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return result_of(equation, a, b)

    def forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, _Operands]:
        # Not by `changed`, whose call would hide a matmul from a policy of jax.checkpoint.
        return run(a, b), (a, b)

    changed = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(run))
    changed.defvjp(forward, backward)
    with mesh_context(equation):
        program = jax.make_jaxpr(changed)(*[jx.struct_of(a) for a in equation.invars])
    return inlined(program, equation, equation.invars, equation.outvars)
