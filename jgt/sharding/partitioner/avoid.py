# pyright: basic
"""XLA's partitioner computes some legal layouts wrongly, without a word. This file gives such operations another layout.

Whether an operation is wrong depends on the layouts of its operands and of its result. Shardy chooses most of these when XLA compiles the
whole training step; the matmuls of the gradient do not even exist before. So the check takes place between lowering and compiling.
If nothing is wrong, XLA gets the very program that it would have got. Otherwise it gets one with sharding constraints around each such
operation (`corrected.py`). docs/partitioner.md has the report to XLA.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from jax._src import compiler
from jaxlib.mlir import ir

from jgt.sharding.partitioner.avoided import is_off


@functools.cache
def avoid_faults(scope: str) -> None:
    """Has this process check each program before it is compiled in which the name of an operation has this scope.

    A second call changes nothing. With JGT_AVOID_FAULTS=0 in the environment, nothing is checked, and JAX stays as it is.
    """
    if os.environ.get("JGT_AVOID_FAULTS") == "0":
        return
    compile_or_get_cached = compiler.compile_or_get_cached

    @functools.wraps(compile_or_get_cached)
    def checked(backend: Any, computation: ir.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_off.get() and _is_checked(computation, scope):
            # Loaded with the first program of several devices.
            corrected = importlib.import_module("jgt.sharding.partitioner.corrected")
            computation = corrected.without_faults(computation, backend.platform)
        return compile_or_get_cached(backend, computation, *args, **kwargs)

    compiler.compile_or_get_cached = checked


def _is_checked(module: ir.Module, scope: str) -> bool:
    """Whether a module is for several devices and the name of an operation has this scope."""
    found = False

    def look(op: ir.Operation) -> ir.WalkResult:
        nonlocal found
        found = isinstance(op.location, ir.NameLoc) and scope in op.location.name_str
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    with module.context:
        if ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value > 1:
            module.operation.walk(look)
    return found
