"""Custom calls of kernels in the text of a compiled program: their work, and the rows that they read.

    %fmha = (bf16[4,8,512,64]{...}, u8[0]{0}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax", backend_config={...}

`jgt.program.kernels` has what these kernels are in a traced program.
"""

from __future__ import annotations

import math
import re

from jgt.planner.hardware.rates import AttentionWork
from jgt.program.kernels import Shape, attention_flops, grouped_matmul_flops

_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha')
_CUDNN_BACKWARD = re.compile(r'__cudnn\$fmha\w*Backward"')
_CUDNN_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^\[]*"dimensions":\[([^\]]*)\]')
_MOSAIC = re.compile(r'custom_call_target="mosaic_gpu')


def custom_call_flops(text: str, first: Shape) -> int | None:
    """FLOPs of one of XLA's custom calls, by its HLO and the shape of its first operand; None for an unknown kernel."""
    if (attention := attention_of(text, first)) is not None:
        return attention.flops
    if not _MOSAIC.search(text):
        return None
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", text)
    return grouped_matmul_flops([tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", operands[1])] if operands else ())


def attention_of(text: str, query: Shape) -> AttentionWork | None:
    """The work of a custom call, from its HLO and the shape of its first operand; None if it is not a kernel of attention."""
    if not _CUDNN.search(text):
        return None
    # The shape of the scores, [batch, heads, queries, keys], which the call's configuration has as JSON.
    found = _CUDNN_SCORES.search(re.sub(r"\s", "", text))
    scores = tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()
    is_backward = _CUDNN_BACKWARD.search(text) is not None
    operands = re.search(r"operand_layout_constraints=\{([^=]*)\}", text)
    widths = [int(n) for n in re.findall(r"\[\d+,\d+,\d+,(\d+)\]", operands[1])] if operands else []
    value = widths[2] if len(widths) > 2 else query[-1]
    # Two matmuls forward and five backward. One and three of them have the width of queries and keys, the others that of values. A plan
    # takes the time of all FLOPs that the device executes.
    width = 3 * query[-1] + 2 * value if is_backward else query[-1] + value
    flops = attention_flops(math.prod(scores) * width if scores else 0, 1, is_causal='CAUSAL"' in text)
    return AttentionWork(flops, scores[-1] if scores else 1, query[-1], is_backward)


def has_foreign_mask(program: str) -> bool:
    """Whether cuDNN's kernel gets the mask of other rows than its queries', in the text of a compiled program.

    JAX splits the kernel's operands over devices as it finds them, and compares the rows of q, k and v, but not of the mask
    (`_check_qkv_bias_mask_spec` in jax/_src/cudnn/fused_attention_stablehlo.py).
    """
    calls = (line for line in program.splitlines() if '"__cudnn$fmhaScaleBias' in line)
    operands = (re.search(r"operand_layout_constraints=\{([^=]*)\}", line) for line in calls)
    # Operands with four dims are q, k, v, the mask, and backward the output and its cotangent.
    rows = (set(re.findall(r"\[(\d+)(?:,\d+){3}\]", found[1])) for found in operands if found)
    return any(len(counts) > 1 for counts in rows)
