"""Kernels that a program calls as one operation, and everything that jgt has to know of each one.

A kernel is opaque. Where XLA's own attention is a dozen equations that can be read, cuDNN's is a single equation whose insides are in a
library. Yet three parts of jgt ask about it: `batch` (does a row of its results depend on one row of its operands only?), the planner's
count of a traced program (how many FLOPs?) and the planner's description of absent GPUs (what does JAX ask of the library while it
traces?). All of their answers are here, in one object a kernel, so that a new kernel is one more object. A primitive that is in none of
them is an ordinary one. Which custom call of a compiled program it is, `jgt/planner/hlo/custom_calls.py` knows.

This file imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LibraryCheck:
    """A function of JAX that asks for a library or a device while it traces. answer(device, arguments): that of one that is described."""

    module: str
    function: str
    answer: Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class CustomKernel:
    """One kernel: its name, and its cost.

    primitives: the JAX primitives that call it. keeps_rows: row i of each result depends on row i of the operands only, provided that the
    rows are the first dim of all of them. traced_flops(primitive, params, shapes of the operands): FLOPs of an equation. heads(params): the
    dim of the heads in q, k, v and the result of an attention. checks: the questions that JAX asks the library.
    """

    name: str
    primitives: frozenset[str]
    keeps_rows: bool
    traced_flops: Callable[[str, Mapping[str, object], Sequence[Shape]], int] | None = None
    heads: Callable[[Mapping[str, object]], int] | None = None
    checks: tuple[LibraryCheck, ...] = ()


def kernel_of(primitive: str) -> CustomKernel | None:
    """The kernel that a JAX primitive calls, by the primitive's name."""
    return _BY_PRIMITIVE.get(primitive)


def _cudnn_traced_flops(primitive: str, params: Mapping[str, object], shapes: Sequence[Shape]) -> int:
    """Two matmuls forward, four backward: backward computes the scores a second time, which is overhead and does not count."""
    query, key, value = shapes[:3]
    num_keys = key[3 - _cudnn_heads(params)]
    is_causal = "CAUSAL" in str(params["mask_type"])
    # Half of the matmuls have the width of queries and keys, the others that of values.
    multiply_adds = math.prod(query[:-1]) * num_keys * (query[-1] + value[-1])
    return attention_flops(multiply_adds, 1 if "_fwd" in primitive else 2, is_causal=is_causal)


def _cudnn_heads(params: Mapping[str, object]) -> int:
    # JAX's layouts: 0 is [batch, seq, heads, head], 1 is [batch, heads, seq, head].
    return 1 if params["layout"] else 2


def attention_flops(multiply_adds: int, num_matmuls: int, *, is_causal: bool) -> int:
    """FLOPs of matmuls with `multiply_adds` each. cuDNN leaves out the masked half of a causal score matrix."""
    return 2 * num_matmuls * multiply_adds // (2 if is_causal else 1)


def _version(device: object) -> int:
    # JAX's CUDA wheels bring cuDNN 9.12 or newer. JAX refuses some masks and head sizes to older versions.
    return 91200


def _has_capability(device: object, wanted: str) -> bool:
    found, needed = (tuple(map(int, text.split("."))) for text in (getattr(device, "compute_capability", "0"), wanted))
    return found >= needed


_FUSED = "jax._src.cudnn.fused_attention_stablehlo"
CUDNN = CustomKernel(
    name="cudnn",
    primitives=frozenset({"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}),
    keeps_rows=True,
    traced_flops=_cudnn_traced_flops,
    heads=_cudnn_heads,
    checks=(
        LibraryCheck(module=_FUSED, function="check_cudnn_version", answer=_version),
        LibraryCheck(module=_FUSED, function="check_compute_capability", answer=_has_capability),
    ),
)


def _mosaic_traced_flops(primitive: str, params: Mapping[str, object], shapes: Sequence[Shape]) -> int:
    return grouped_matmul_flops(shapes)


def grouped_matmul_flops(shapes: Sequence[Shape]) -> int:
    """The FLOPs of a grouped matmul from the shapes of its operands; 0 for another kernel.

    Lists come first, such as the sizes of groups, and two arrays last: [n, k] and [e, k, m], or for the gradient of weights [n, k] and
    [n, m].
    """
    *lists, left, right = shapes if len(shapes) > 2 else ((), (), ())
    if not lists or len(left) != 2 or any(len(shape) != 1 for shape in lists):
        return 0
    if len(right) == 2 and right[0] == left[0]:
        return 2 * left[0] * left[1] * right[1]
    return 2 * left[0] * right[1] * right[2] if len(right) == 3 and left[1] in right[1:] and lists[0] == right[:1] else 0


MOSAIC = CustomKernel(
    name="mosaic",
    # JAX's kernels for grouped matmuls on Hopper, which `jgt.replacements.experts.grouped` calls. Other kernels of Mosaic count no FLOPs.
    primitives=frozenset({"mpmd_map"}),
    keeps_rows=False,
    traced_flops=_mosaic_traced_flops,
)

KERNELS = (
    CUDNN,
    MOSAIC,
    # `jgt.signal.experts`: each row goes through its own experts.
    CustomKernel(name="experts", primitives=frozenset({"on_devices"}), keeps_rows=True),
    # A user's own kernels and a library's that nothing here calls. That they keep rows apart is an assumption; jgt cannot look inside.
    CustomKernel(
        name="other",
        primitives=frozenset({"pallas_call", "tpu_custom_call", "triton_kernel_call", "ffi_call", "scaled_matmul", "scaled_matmul_wrapper"})
        | {"dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd_wrapper"},
        keeps_rows=True,
    ),
)
# The first kernel that names a primitive has it.
_BY_PRIMITIVE = {primitive: kernel for kernel in reversed(KERNELS) for primitive in kernel.primitives}
