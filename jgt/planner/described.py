"""GPUs that are described, but not attached: the devices to compile for, and the answers that JAX would ask them for.

XLA compiles for a GPU from a description alone (a GpuTargetConfigProto, see `chips/`), with JAX's CUDA plugin and without a driver. JAX
asks a real device two more questions while it traces and lowers: which version of cuDNN is installed, and which kinds of memory there
are. This file supplies the answers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Generator, Sequence
from importlib import metadata, util
from typing import Any, cast

import jax
from jax.experimental import topologies
from jaxlib.mlir import ir

from jgt.document import InputError
from jgt.planner.hardware.target import Target
from jgt.program.kernels import KERNELS

EXTRA = "pip install 'jgt[plan-gpu]'"
# The plugin is named after the version of CUDA that it is built for.
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
HOST = "pinned_host"
"""JAX's name of the host's memory, in a sharding's `memory_kind`."""
_KIND = "mhlo.memory_kind"


def devices_of(target: Target) -> Sequence[Any]:
    """The devices of a target, host by host; programs can be compiled for them, but not run.

    Raises InputError if the CUDA plugin is missing, or if its version is not jaxlib's.
    """
    _check_plugin(target)
    # Without this variable the plugin looks for a driver, and fails if there is none.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Slices x hosts of a slice x GPUs of a host. JAX calls a group of GPUs with fast links a slice, which here is one host.
    shape = f"{target.num_hosts}x1x{target.per_host}"
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=target.chip.xla, topology=shape)
    except Exception as error:
        # jaxlib raises exceptions of several types here; only the message says what the plugin does not support.
        why = f"jaxlib {metadata.version('jaxlib')} cannot compile for it: {str(error).splitlines()[0]}"
        raise InputError([f"target {target.text}: {why}"]) from error
    return cast("Sequence[Any]", topology.devices)


def _check_plugin(target: Target) -> None:
    plugin = next((name for name in _PLUGINS if util.find_spec(name)), None)
    if plugin is None:
        needs = f"planning for a GPU needs JAX's CUDA plugin (about 130 MB, no driver, no GPU): {EXTRA}"
        raise InputError([f"target {target.text}: {needs}. Without a target, jgt plans for CPU devices"])
    version, jaxlib = metadata.version(plugin.replace("_", "-")), metadata.version("jaxlib")
    if version != jaxlib:
        differ = f"the CUDA plugin is version {version}, but jaxlib is {jaxlib}"
        raise InputError([f"target {target.text}: {differ}. Install the plugin of jaxlib's version: {EXTRA}"])


def keep_on_host(lowered: jax.stages.Lowered, arguments: Sequence[bool], results: Sequence[bool]) -> None:
    """Marks which arguments and results of a lowered program are in the host's memory, as JAX does for real devices.

    Without results in the host's memory nothing is marked. JAX then writes no transfers into the program either, so that for XLA
    every array is on the device.
    """
    if not any(results):
        return
    module: Any = lowered.compiler_ir()
    main = next(
        op for op in module.body.operations if "sym_name" in op.attributes and ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )
    with module.context:
        for name, on_host in (("arg_attrs", arguments), ("res_attrs", results)):
            kinds = [HOST if is_there else "device" for is_there in on_host]
            marked = [_with_kind(old, kind) for old, kind in zip(ir.ArrayAttr(main.attributes[name]), kinds, strict=True)]
            main.attributes[name] = ir.ArrayAttr.get(marked)


def _with_kind(attributes: ir.Attribute, kind: str) -> ir.Attribute:
    named = {attribute.name: attribute.attr for attribute in ir.DictAttr(attributes)}
    return ir.DictAttr.get(named | {_KIND: ir.StringAttr.get(kind)})


@contextlib.contextmanager
def described(device: Any = None) -> Generator[None]:
    """Lets programs that call a library's kernels be traced for a GPU that is only described, as if the library were installed.

    device: the description, which JAX asks for its compute capability; None: the least one.
    """
    # `jax.nn.dot_product_attention(implementation="cudnn")` asks the installed cuDNN for its version while it traces, and raises
    # without one. JAX has no option for that, so the private function is replaced for the time of the block, in the whole process.
    with contextlib.ExitStack() as stack:
        for check in (check for kernel in KERNELS for check in kernel.checks):
            module = importlib.import_module(check.module)
            stack.callback(setattr, module, check.function, getattr(module, check.function))
            setattr(module, check.function, functools.partial(check.answer, device))
        yield


@contextlib.contextmanager
def described_device(target: Target) -> Generator[Any]:
    """One of a target's devices, for which programs can be traced in this block. Raises InputError like `devices_of`."""
    device = devices_of(target)[0]
    with described(device):
        yield device
