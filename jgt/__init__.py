"""jgt shards JAX programs by name. Names are resolved on first use, so that `import jgt` does not import JAX."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgt import signal as signal
    from jgt.document import InputError as InputError
    from jgt.mesh.mesh import abstract_mesh as abstract_mesh
    from jgt.mesh.mesh import make_mesh as make_mesh
    from jgt.pipeline.config import Pipeline as Pipeline
    from jgt.placement import Placement as Placement
    from jgt.plan.plan import Plan as Plan
    from jgt.plan.plan import plan as plan
    from jgt.rules import Rules as Rules
    from jgt.rules import load_rules as load_rules
    from jgt.rules import make_rules as make_rules
    from jgt.shard import init as init
    from jgt.shard import place as place
    from jgt.shard import shard as shard

__version__ = "0.1.0"

_OWNERS = {
    "InputError": "jgt.document",
    "Pipeline": "jgt.pipeline.config",
    "Placement": "jgt.placement",
    "Plan": "jgt.plan.plan",
    "Rules": "jgt.rules",
    "abstract_mesh": "jgt.mesh.mesh",
    "init": "jgt.shard",
    "load_rules": "jgt.rules",
    "make_mesh": "jgt.mesh.mesh",
    "make_rules": "jgt.rules",
    "place": "jgt.shard",
    "plan": "jgt.plan.plan",
    "shard": "jgt.shard",
}

__all__ = [
    "InputError",
    "Pipeline",
    "Placement",
    "Plan",
    "Rules",
    "abstract_mesh",
    "init",
    "load_rules",
    "make_mesh",
    "make_rules",
    "place",
    "plan",
    "shard",
    "signal",
]


class _Package(types.ModuleType):
    """Resolves public names on first use; a function keeps its name when the module it lives in is imported."""

    def __getattr__(self, name: str) -> Any:
        if name == "signal":
            return importlib.import_module("jgt.signal")
        if name not in _OWNERS:
            raise AttributeError(f"module 'jgt' has no attribute {name!r}")
        value = getattr(importlib.import_module(_OWNERS[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _OWNERS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *__all__])


sys.modules[__name__].__class__ = _Package
