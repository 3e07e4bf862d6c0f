"""jgt shards JAX programs by name. Names load on first use, so that `import jgt` does not import JAX.

`__all__` has the public names. The others are for programs that are built on jgt, as the trainer is, which import nothing else but
`jgt.document`, `jgt.planner` and `jgt.signal`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jgt.mesh.nvidia import quiet_plugin

if TYPE_CHECKING:
    from jgt import signal
    from jgt.adapters.matrices import Matrix as Matrix
    from jgt.adapters.packed import Packing as Packing
    from jgt.api.found import rules_of
    from jgt.api.jitted import verify_jit
    from jgt.api.picture import picture
    from jgt.api.shard import init, place, shard
    from jgt.api.verify import Verification, verify
    from jgt.command.commands import find_command as find_command
    from jgt.command.console import Console as Console
    from jgt.command.console import amount as amount
    from jgt.command.parser import CommandParser as CommandParser
    from jgt.command.trainer import load, run
    from jgt.command.trainer import trainer as trainer
    from jgt.document import InputError
    from jgt.mesh.mesh import abstract_mesh, make_mesh
    from jgt.mesh.mesh import use_virtual_cpu as use_virtual_cpu
    from jgt.mesh.sizes import MeshSizes as MeshSizes
    from jgt.pipeline.config import PipelineConfig as PipelineConfig
    from jgt.pipeline.staging import Pipeline
    from jgt.planner.plan import Plan, plan
    from jgt.replacements.experts.experts import Experts as Experts
    from jgt.replacements.gradients import sum_of_groups as sum_of_groups
    from jgt.replacements.layers import recomputed as recomputed
    from jgt.replacements.replicas import Replicas as Replicas
    from jgt.rules import Rules, load_rules, make_rules
    from jgt.rules.pattern import matches_end as matches_end
    from jgt.rules.schema import file_schemas as file_schemas
    from jgt.sharding.inputs import path_text as path_text
    from jgt.sharding.placement import Placement
    from jgt.sharding.sharded import Sharded as Sharded
    from jgt.sharding.storage import Storage as Storage

__version__ = "0.1.0"

# Before anything asks JAX for devices.
quiet_plugin()

_NAMES = {
    "jgt.adapters.matrices": ("Matrix",),
    "jgt.adapters.packed": ("Packing",),
    "jgt.api.found": ("rules_of",),
    "jgt.api.jitted": ("verify_jit",),
    "jgt.api.picture": ("picture",),
    "jgt.api.shard": ("init", "place", "shard"),
    "jgt.api.verify": ("Verification", "verify"),
    "jgt.command.commands": ("find_command",),
    "jgt.command.console": ("Console", "amount"),
    "jgt.command.parser": ("CommandParser",),
    "jgt.command.trainer": ("load", "run", "trainer"),
    "jgt.document": ("InputError",),
    "jgt.mesh.mesh": ("abstract_mesh", "make_mesh", "use_virtual_cpu"),
    "jgt.mesh.sizes": ("MeshSizes",),
    "jgt.pipeline.config": ("PipelineConfig",),
    "jgt.pipeline.staging": ("Pipeline",),
    "jgt.planner.plan": ("Plan", "plan"),
    "jgt.replacements.experts.experts": ("Experts",),
    "jgt.replacements.gradients": ("sum_of_groups",),
    "jgt.replacements.layers": ("recomputed",),
    "jgt.replacements.replicas": ("Replicas",),
    "jgt.rules": ("Rules", "load_rules", "make_rules"),
    "jgt.rules.pattern": ("matches_end",),
    "jgt.rules.schema": ("file_schemas",),
    "jgt.sharding.inputs": ("path_text",),
    "jgt.sharding.placement": ("Placement",),
    "jgt.sharding.sharded": ("Sharded",),
    "jgt.sharding.storage": ("Storage",),
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
    "picture",
    "place",
    "plan",
    "rules_of",
    "run",
    "shard",
    "signal",
    "verify",
    "verify_jit",
]


def __getattr__(name: str) -> Any:
    # The only public name that is a module: its functions are read as jgt.signal.context and jgt.signal.tensor.
    if name == "signal":
        return importlib.import_module("jgt.signal")
    if name not in _OWNERS:
        near = importlib.import_module("jgt.document").nearest(name, __all__)
        raise AttributeError(f"module 'jgt' has no attribute {name!r}. {near}".rstrip())
    # Stored in the module, so that Python asks `__getattr__` once for each name.
    value = globals()[name] = getattr(importlib.import_module(_OWNERS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
