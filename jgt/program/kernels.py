"""Kernels that a program calls as one operation, and everything that jgt has to know of each one.

A kernel is opaque. Where XLA's own attention is a dozen equations that can be read, cuDNN's is a single equation whose insides are in a
library. Yet four parts of jgt ask about it: `batch` (does a row of its results depend on one row of its operands only?), the planner's
count of a traced program (how many FLOPs?), the reader of compiled programs (which custom call is it, and how many FLOPs?) and the
planner's description of absent GPUs (what does JAX ask of the library while it traces?). All of their answers are here, in one object a
kernel, so that a new kernel is one more object. A primitive that is in none of them is an ordinary one.

This file imports no JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


class AttentionWork(NamedTuple):
    """A kernel of fused attention. flops: the FLOPs that it executes; keys: the length that its queries see; head: the size of a head."""

    flops: int
    keys: int
    head: int
    is_backward: bool


@dataclass(frozen=True, kw_only=True)
class LibraryCheck:
    """A function of JAX that asks a library for its version while it traces, and the answer for a device that is absent."""

    module: str
    function: str
    answer: int


@dataclass(frozen=True, kw_only=True)
class CustomKernel:
    """One kernel: its name in JAX and in XLA, and its cost.

    primitives: the JAX primitives that call it. keeps_rows: row i of each result depends on row i of the operands only, provided that the
    rows are the first dim of all of them. traced_flops(primitive, params, shapes of the operands): FLOPs of an equation. custom_call: a
    pattern for the target of XLA's custom call. compiled_flops(text, shape of the first operand): FLOPs of that custom call, from its HLO.
    attention(text, shape of the queries): the work of that custom call, if it is fused attention. checks: the questions that JAX asks the
    library.
    """

    name: str
    primitives: frozenset[str]
    keeps_rows: bool
    traced_flops: Callable[[str, Mapping[str, object], Sequence[Shape]], int] | None = None
    custom_call: re.Pattern[str] | None = None
    compiled_flops: Callable[[str, Shape], int] | None = None
    attention: Callable[[str, Shape], AttentionWork] | None = None
    checks: tuple[LibraryCheck, ...] = ()


def kernel_of(primitive: str) -> CustomKernel | None:
    """The kernel that a JAX primitive calls, by the primitive's name."""
    return _BY_PRIMITIVE.get(primitive)


def custom_call_flops(text: str, shape: Shape) -> int | None:
    """FLOPs of one of XLA's custom calls, by its HLO and the shape of its first operand; None if no kernel here is its target."""
    for kernel in KERNELS:
        if kernel.custom_call and kernel.compiled_flops and kernel.custom_call.search(text):
            return kernel.compiled_flops(text, shape)
    return None


def attention_of(text: str, query: Shape) -> AttentionWork | None:
    """The work of a custom call, from its HLO and the shape of its first operand; None if it is not a kernel of attention."""
    for kernel in KERNELS:
        if kernel.custom_call and kernel.attention and kernel.custom_call.search(text):
            return kernel.attention(text, query)
    return None


def _cudnn_traced_flops(primitive: str, params: Mapping[str, object], shapes: Sequence[Shape]) -> int:
    """Two matmuls forward, four backward: backward computes the scores a second time, which is overhead and does not count."""
    query, key = shapes[:2]
    # JAX's layouts: 0 is [batch, seq, heads, head], 1 is [batch, heads, seq, head].
    num_keys = key[2 if params["layout"] else 1]
    is_causal = "CAUSAL" in str(params["mask_type"])
    return _attention_flops(math.prod(query) * num_keys, 2 if "_fwd" in primitive else 4, is_causal=is_causal)


def _cudnn_compiled_flops(text: str, query: Shape) -> int:
    """Two matmuls forward, five backward: a plan takes the time of all FLOPs that the device executes."""
    scores = _cudnn_scores(text)
    num_scores = math.prod(scores) if scores else 0
    return _attention_flops(num_scores * query[-1], 5 if _CUDNN_BACKWARD.search(text) else 2, is_causal='CAUSAL"' in text)


def _cudnn_attention(text: str, query: Shape) -> AttentionWork:
    scores = _cudnn_scores(text)
    is_backward = _CUDNN_BACKWARD.search(text) is not None
    return AttentionWork(_cudnn_compiled_flops(text, query), scores[-1] if scores else 1, query[-1], is_backward)


def _cudnn_scores(text: str) -> Shape:
    """The shape of the scores, [batch, heads, queries, keys], which the call's configuration has as JSON."""
    found = _CUDNN_SCORES.search(re.sub(r"\s", "", text))
    return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()


def _attention_flops(multiply_adds: int, num_matmuls: int, *, is_causal: bool) -> int:
    """FLOPs of matmuls with `multiply_adds` each. cuDNN leaves out the masked half of a causal score matrix."""
    return 2 * num_matmuls * multiply_adds // (2 if is_causal else 1)


_CUDNN_BACKWARD = re.compile(r'__cudnn\$fmha\w*Backward"')
_CUDNN_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^\[]*"dimensions":\[([^\]]*)\]')

CUDNN = CustomKernel(
    name="cudnn",
    primitives=frozenset({"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}),
    keeps_rows=True,
    traced_flops=_cudnn_traced_flops,
    custom_call=re.compile(r'custom_call_target="__cudnn\$fmha'),
    compiled_flops=_cudnn_compiled_flops,
    attention=_cudnn_attention,
    # JAX's CUDA wheels bring cuDNN 9.12 or newer. JAX refuses some masks and head sizes to older versions.
    checks=(LibraryCheck(module="jax._src.cudnn.fused_attention_stablehlo", function="check_cudnn_version", answer=91200),),
)


def _mosaic_traced_flops(primitive: str, params: Mapping[str, object], shapes: Sequence[Shape]) -> int:
    return _grouped_flops(shapes)


def _mosaic_compiled_flops(text: str, first: Shape) -> int:
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", text)
    return _grouped_flops([tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", operands[1])] if operands else ())


def _grouped_flops(shapes: Sequence[Shape]) -> int:
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
    custom_call=re.compile(r'custom_call_target="mosaic_gpu'),
    compiled_flops=_mosaic_compiled_flops,
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
_BY_PRIMITIVE = {primitive: kernel for kernel in KERNELS for primitive in kernel.primitives}
