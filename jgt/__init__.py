"""jgt shards JAX programs by name. Public names load on first use, so that `import jgt` does not import JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jgt.mesh.nvidia import quiet_plugin

if TYPE_CHECKING:
    from jgt import signal
    from jgt.api.shard import init, place, shard
    from jgt.api.verify import Verification, verify
    from jgt.command.trainer import load, run
    from jgt.document import InputError
    from jgt.mesh.mesh import abstract_mesh, make_mesh
    from jgt.pipeline.staging import Pipeline
    from jgt.planner.plan import Plan, plan
    from jgt.rules import Rules, load_rules, make_rules
    from jgt.sharding.placement import Placement

__version__ = "0.1.0"

# Before anything asks JAX for devices.
quiet_plugin()

_NAMES = {
    "jgt.api.shard": ("init", "place", "shard"),
    "jgt.api.verify": ("Verification", "verify"),
    "jgt.command.trainer": ("load", "run"),
    "jgt.document": ("InputError",),
    "jgt.mesh.mesh": ("abstract_mesh", "make_mesh"),
    "jgt.pipeline.staging": ("Pipeline",),
    "jgt.planner.plan": ("Plan", "plan"),
    "jgt.rules": ("Rules", "load_rules", "make_rules"),
    "jgt.sharding.placement": ("Placement",),
}
_OWNERS = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "InputError",
    "Pipeline",
    "Placement",
    "Plan",
    "Rules",
    "Verification",
    "abstract_mesh",
    "init",
    "load",
    "load_rules",
    "make_mesh",
    "make_rules",
    "place",
    "plan",
    "run",
    "shard",
    "signal",
    "verify",
]


def __getattr__(name: str) -> Any:
    # The only public name that is a module: its functions are read as jgt.signal.context and jgt.signal.tensor.
    if name == "signal":
        return importlib.import_module("jgt.signal")
    if name not in _OWNERS:
        near = importlib.import_module("jgt.document").nearest(name, __all__, lists=False)
        raise AttributeError(f"module 'jgt' has no attribute {name!r}. {near}".rstrip())
    # Stored in the module, so that Python asks `__getattr__` once for each name.
    value = globals()[name] = getattr(importlib.import_module(_OWNERS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
