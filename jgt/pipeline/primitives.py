"""What each primitive does to the rows of a batch. What is not known here is taken to mix them."""

from __future__ import annotations

from collections.abc import Sequence

from jgt.jaxpr import Equation
from jgt.pipeline.indexing import Given, of_places
from jgt.pipeline.moves import RULES
from jgt.pipeline.rows import (
    MixingError,
    Rows,
    copies_of,
    each,
    grown_dim,
    names,
    refuse_indices,
    refuse_other_params,
    shape_of,
    together,
)

ELEMENTWISE = names(
    # What JAX batches as working on each element alone, of operands of one shape or of none.
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj convert_element_type "
    "copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow "
    "is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not "
    "one_minus_square or polygamma polynomial population_count pow pvary pcast random_clone random_fold_in random_gamma real "
    "reduce_precision regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta"
)
CORE_DIMS = {
    # How many last dims of the operands belong together.
    **dict.fromkeys(names("bitcast_convert_type random_bits random_seed random_split random_unwrap random_wrap"), 0),
    **dict.fromkeys(names("cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd triangular_solve tridiagonal"), 2),
    "lu_pivots_to_permutation": 1,
    "tridiagonal_solve": 2,
}
KERNELS = names(
    "pallas_call tpu_custom_call triton_kernel_call ffi_call dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper scaled_matmul scaled_matmul_wrapper"
)
"""Taken at their word, if the rows come first: a row of the result is made of that row of the operands."""

_MAKERS = names("broadcast_in_dim empty iota random_bits random_gamma random_split rng_bit_generator")
"""What may make rows of nothing: all alike, counted, or random."""


def places(equation: Equation, twin: Equation, given: Given, num_rows: tuple[int, int]) -> list[Rows | None]:
    """Where the results of an equation hold rows; `twin` is the same equation at another batch size. Raises MixingError."""
    name = equation.primitive.name
    grown = [grown_dim(a, b, num_rows) for a, b in zip(equation.outvars, twin.outvars, strict=True)]
    if not any(given):
        return _of_nothing(equation, twin, grown)
    if any(rows and rows.is_index for rows in given):
        special = of_places(equation, twin, given)
        if special is not None:
            return _checked(name, each(special, grown), grown)
    if name in KERNELS:
        return _kernel(name, given, grown)
    refuse_other_params(equation, twin, has_rows=True)
    if name in ELEMENTWISE:
        return _checked(name, each(together(equation, given), grown), grown)
    if name in CORE_DIMS or name == "fft":
        return _checked(name, each(_leading(equation, given), grown), grown)
    rule = RULES.get(name)
    if rule is None:
        raise MixingError(f"{name} is not known to keep the rows of a batch apart")
    found = rule(equation, twin, given)
    return _checked(name, found if isinstance(found, list) else each(found, grown), grown)


def _of_nothing(equation: Equation, twin: Equation, grown: Sequence[int | None]) -> list[Rows | None]:
    name = equation.primitive.name
    if all(dim is None for dim in grown):
        refuse_other_params(equation, twin, has_rows=False)
        return [None] * len(grown)
    if name not in _MAKERS:
        raise MixingError(f"{name} takes as many rows as the batch has of something that is no batch")
    counts = name == "iota" and equation.params["dimension"] == grown[0]
    return [None if dim is None else Rows(dim, 0, "place" if counts else "") for dim in grown]


def _checked(name: str, found: Sequence[Rows | None], grown: Sequence[int | None]) -> list[Rows | None]:
    if any(dim is not None and (rows is None or rows.dim != dim) for rows, dim in zip(found, grown, strict=True)):
        raise MixingError(f"{name} moves the rows of the batch where they are not followed")
    return [None if dim is None else rows for rows, dim in zip(found, grown, strict=True)]


def _kernel(name: str, given: Given, grown: Sequence[int | None]) -> list[Rows | None]:
    refuse_indices(name, given)
    if any(rows and rows.dim for rows in given) or any(grown):
        raise MixingError(f"{name} is a kernel, which is taken to keep rows apart only if they are the first dim of all that it reads and returns")
    copies = copies_of(name, given)
    return [None if dim is None else Rows(0, copies) for dim in grown]


def _leading(equation: Equation, given: Given) -> Rows:
    """Matrices, or transforms, one for each row."""
    name = equation.primitive.name
    num_last = len(equation.params["fft_lengths"]) if name == "fft" else CORE_DIMS[name]
    for atom, rows in zip(equation.invars, given, strict=True):
        if rows and rows.dim >= len(shape_of(atom)) - num_last:
            raise MixingError(f"{name} works along the rows of the batch")
    return together(equation, given)


def runs_programs(equation: Equation) -> bool:
    """Whether an equation runs the programs it holds on its own operands."""
    return equation.primitive.name in _CALLS


_CALLS = names(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_partitioning "
    "scan while cond shard_map composite xla_metadata_call"
)
