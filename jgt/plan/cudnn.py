"""cuDNN's attention in programs for GPUs that are not here: what JAX asks of cuDNN, and what its kernels cost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from jax._src.cudnn import fused_attention_stablehlo

_VERSION = 91200
"""9.12: that of JAX's own CUDA wheels, or an earlier one."""


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Lets programs with cuDNN's attention be traced for a GPU that is only described, as if its cuDNN were installed."""
    before = fused_attention_stablehlo.check_cudnn_version
    fused_attention_stablehlo.check_cudnn_version = lambda: _VERSION
    try:
        yield
    finally:
        fused_attention_stablehlo.check_cudnn_version = before


def attention_flops(equation: Any) -> int:
    """FLOPs of an equation of a traced program; 0 if it is no attention of cuDNN.

    Two matmuls forward, four backward: the scores that it computes once more are not counted, and of a causal mask half.
    """
    name, params = equation.primitive.name, equation.params
    if not name.startswith(("dot_product_attention_fwd", "dot_product_attention_bwd")):
        return 0
    query, key = (v.aval.shape for v in equation.invars[:2])
    seq = 2 if params["layout"] else 1
    scores = math.prod(query) * key[seq]
    return (4 if "_fwd" in name else 8) * scores // (2 if "CAUSAL" in params["mask_type"].name else 1)
