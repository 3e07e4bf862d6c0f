"""Arrays in the host's memory, for devices that are only described: JAX asks such a device for its memories, and it knows none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

HOST = "pinned_host"
_KIND = "mhlo.memory_kind"


def keep_on_host(lowered: Any, arguments: Sequence[bool], results: Sequence[bool]) -> None:
    """Says of a lowered program which of its arrays are in the host's memory, as JAX does for devices that are here.

    Without a result there JAX writes no transfers into the program, and it is left as it is: for XLA all is on the device.
    """
    if not any(results):
        return
    module = lowered.compiler_ir()
    main = next(op for op in module.body.operations if "sym_name" in op.attributes and ir.StringAttr(op.attributes["sym_name"]).value == "main")
    with module.context:
        for name, on_host in (("arg_attrs", arguments), ("res_attrs", results)):
            kinds = [HOST if there else "device" for there in on_host]
            changed = [_with_kind(old, kind) for old, kind in zip(ir.ArrayAttr(main.attributes[name]), kinds, strict=True)]
            main.attributes[name] = ir.ArrayAttr.get(changed)


def _with_kind(attributes: Any, kind: str) -> Any:
    named = {one.name: one.attr for one in ir.DictAttr(attributes)}
    return ir.DictAttr.get(named | {_KIND: ir.StringAttr.get(kind)})
