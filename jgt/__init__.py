"""jgt shards JAX programs by name. Public names load on first use, so that `import jgt` does not import JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jgt.mesh.nvidia import quiet_plugin

if TYPE_CHECKING:
    from jgt import signal as signal
    from jgt.api.shard import init as init
    from jgt.api.shard import place as place
    from jgt.api.shard import shard as shard
    from jgt.api.verify import Verification as Verification
    from jgt.api.verify import verify as verify
    from jgt.command.trainer import load as load
    from jgt.command.trainer import run as run
    from jgt.document import InputError as InputError
    from jgt.mesh.mesh import abstract_mesh as abstract_mesh
    from jgt.mesh.mesh import make_mesh as make_mesh
    from jgt.pipeline.staging import Pipeline as Pipeline
    from jgt.planner.plan import Plan as Plan
    from jgt.planner.plan import plan as plan
    from jgt.rules import Rules as Rules
    from jgt.rules import load_rules as load_rules
    from jgt.rules import make_rules as make_rules
    from jgt.sharding.placement import Placement as Placement

__version__ = "0.1.0"

# Before anything asks JAX for devices.
quiet_plugin()

_OWNERS = {
    "InputError": "jgt.document",
    "Pipeline": "jgt.pipeline.staging",
    "Placement": "jgt.sharding.placement",
    "Plan": "jgt.planner.plan",
    "Rules": "jgt.rules",
    "Verification": "jgt.api.verify",
    "abstract_mesh": "jgt.mesh.mesh",
    "init": "jgt.api.shard",
    "load": "jgt.command.trainer",
    "load_rules": "jgt.rules",
    "make_mesh": "jgt.mesh.mesh",
    "make_rules": "jgt.rules",
    "place": "jgt.api.shard",
    "plan": "jgt.planner.plan",
    "run": "jgt.command.trainer",
    "shard": "jgt.api.shard",
    "verify": "jgt.api.verify",
}

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
