"""Devices that are not here: JAX's deviceless compilation for a described GPU, with the CUDA plugin and no driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata, util
from typing import Any

from jax.experimental import topologies

from jgt.document import InputError
from jgt.plan.chip import Target

EXTRA = "pip install 'jgt[plan-gpu]'"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def devices_of(target: Target) -> Sequence[Any]:
    """The devices of a target, host by host; programs can be compiled for them, and nothing else.

    Raises InputError where the plugin is missing or is not of this jaxlib.
    """
    _check_plugin(target)
    # The plugin looks for a driver, unless it is told that there is none to be found.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # A host is a slice, a part of the machine with fast links inside, as JAX counts real GPUs.
    shape = f"{target.num_hosts}x1x{target.per_host}"
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=target.chip.xla, topology=shape)
    except Exception as error:
        raise InputError([f"--target {target.text}: jaxlib {metadata.version('jaxlib')} cannot compile for it: {str(error).splitlines()[0]}"]) from error
    return topology.devices


def _check_plugin(target: Target) -> None:
    found = next((name for name in _PLUGINS if util.find_spec(name)), None)
    if found is None:
        raise InputError(
            [
                f"--target {target.text}: compiling for a GPU that is not here needs JAX's CUDA plugin (about 130 MB, no driver): {EXTRA}. "
                "Without --target the plan is made for CPU devices"
            ]
        )
    version, own = metadata.version(found.replace("_", "-")), metadata.version("jaxlib")
    if version != own:
        raise InputError([f"--target {target.text}: the CUDA plugin is version {version}, but jaxlib is {own}. Install the plugin of this jaxlib: {EXTRA}"])
