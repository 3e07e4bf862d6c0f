"""Which primitives keep the rows of a batch apart, and where their results have them.

Elementwise primitives, primitives of the last dims and kernels need no rule of their own. Other primitives have a rule in the table
`RULES`, and one without a rule is refused. Whatever a rule claims is then compared with the shapes at two batch sizes: a result that grows
with the batch must have its rows in the dim that grows.
"""

from __future__ import annotations

from collections.abc import Sequence

from jgt.pipeline.batch import slices
from jgt.pipeline.batch.indexing import index_rows
from jgt.pipeline.batch.row_rules import RULES
from jgt.pipeline.batch.rows import (
    MixingError,
    OperandRows,
    Rows,
    common_copies,
    common_rows,
    grown_dim,
    names,
    refuse_indices,
    refuse_params,
)
from jgt.program import jaxpr as jx
from jgt.program.dataflow import ELEMENTWISE
from jgt.program.equations import is_remat
from jgt.program.jaxpr import Equation
from jgt.program.kernels import kernel_of

CORE_DIMS: dict[str, tuple[int, ...]] = {
    # The number of last dims of each operand (or of all) that a primitive works on; it treats the dims in front of them independently.
    **dict.fromkeys(names("bitcast_convert_type random_bits random_seed random_split random_unwrap random_wrap"), (0,)),
    **dict.fromkeys(names("cholesky eig eigh geqrf hessenberg lu qr schur svd symmetric_product triangular_solve tridiagonal"), (2,)),
    **dict.fromkeys(names("geqp3 householder_product"), (2, 1)),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "tridiagonal_solve": (1, 1, 1, 2),
}
_MAKERS = names("broadcast_in_dim empty iota random_bits random_gamma random_split rng_bit_generator")
"""Primitives that may make rows out of operands without rows. The new rows are equal, counted or random."""

_CALLS = names(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_partitioning "
    "scan while cond shard_map composite xla_metadata_call custom_linear_solve custom_vmap_call"
)


def runs_programs(equation: Equation) -> bool:
    """Whether an equation applies the programs in its params to its own operands, so that they can be followed."""
    # By name, because other primitives have programs too: the one in a sort or a scatter combines single elements.
    return equation.primitive.name in _CALLS or is_remat(equation)


def result_rows(equation: Equation, twin: Equation, operand_rows: OperandRows, num_rows: tuple[int, int]) -> list[Rows | None]:
    """Where each result of an equation has rows; `twin` is the equation at another batch size. Raises MixingError if it mixes them."""
    name = equation.primitive.name
    grown = [grown_dim(a, b, num_rows) for a, b in zip(equation.outvars, twin.outvars, strict=True)]
    if not any(operand_rows):
        return _made_rows(equation, twin, grown, num_rows)
    kernel = kernel_of(name)
    if kernel is not None and kernel.keeps_rows:
        return _kernel_rows(name, operand_rows, grown)
    # An index is only followed through the steps that make indices. Anything else falls through, and its rule refuses places.
    rows = index_rows(equation, twin, operand_rows) if any(rows and rows.is_index for rows in operand_rows) else None
    if rows is None:
        refuse_params(equation, twin, has_rows=True)
        if name not in _RULES:
            raise MixingError(f"{name} is not known to keep the rows of a batch apart")
        rows = _RULES[name](equation, twin, operand_rows)
    results = rows if isinstance(rows, list) else [rows] * len(grown)
    if any(dim is not None and (rows is None or rows.dim != dim) for rows, dim in zip(results, grown, strict=True)):
        raise MixingError(f"{name} moves the rows of the batch in a way that jgt cannot follow")
    return [None if dim is None else rows for rows, dim in zip(results, grown, strict=True)]


def _made_rows(equation: Equation, twin: Equation, grown: Sequence[int | None], num_rows: tuple[int, int]) -> list[Rows | None]:
    """The rows of results whose operands have none, as in jnp.ones(batch_size)."""
    name = equation.primitive.name
    if all(dim is None for dim in grown):
        refuse_params(equation, twin, has_rows=False)
        return [None] * len(grown)
    if name == "tile":
        return [slices.tiled_rows(equation, twin, num_rows)]
    if name not in _MAKERS:
        raise MixingError(
            f"{name} takes as many rows as the batch has from something that is not the batch. Pass them as an input, or make "
            "one for all rows by jnp.broadcast_to"
        )
    # iota along the rows counts them; along another dim, all rows are equal.
    counts = name == "iota" and equation.params["dimension"] == grown[0]
    return [None if dim is None else Rows(dim, 0, "place" if counts else "") for dim in grown]


def _kernel_rows(name: str, operand_rows: OperandRows, grown: Sequence[int | None]) -> list[Rows | None]:
    refuse_indices(name, operand_rows)
    if any(rows and rows.dim for rows in operand_rows) or any(grown):
        raise MixingError(
            f"{name} is a kernel. It is assumed to keep rows apart only if they are the first dim of all that it reads and returns"
        )
    copies = common_copies(name, operand_rows)
    return [None if dim is None else Rows(0, copies) for dim in grown]


def _elementwise(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    return common_rows(equation, operand_rows)


def _leading_rows(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """The rows of a primitive that works on the last dims, such as a matrix decomposition for each row."""
    name = equation.primitive.name
    core = (len(equation.params["fft_lengths"]),) if name == "fft" else CORE_DIMS[name]
    for n, (atom, rows) in enumerate(zip(equation.invars, operand_rows, strict=True)):
        if rows and rows.dim >= len(jx.shape_of(atom)) - core[min(n, len(core) - 1)]:
            raise MixingError(f"{name} works along the rows of the batch")
    return common_rows(equation, operand_rows)


def _column_rows(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """The rows of the last operand, whose columns a matrix is applied to one by one; from the right, it is applied to its rows."""
    *matrix, columns = operand_rows
    is_left = equation.params.get("left_side", equation.params.get("left", True))
    worked_on = len(jx.shape_of(equation.invars[-1])) - (2 if is_left else 1)
    if any(matrix) or not columns or columns.dim == worked_on:
        return _leading_rows(equation, twin, operand_rows)
    return common_rows(equation, operand_rows)


_RULES = {
    **RULES,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys([*CORE_DIMS, "fft"], _leading_rows),
    **dict.fromkeys(names("ormqr triangular_solve tridiagonal_solve"), _column_rows),
}
