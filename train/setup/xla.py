"""XLA's flags, its share of a GPU's memory and the folder of compiled programs, all set before JAX starts its devices.

XLA aborts the whole process for a flag that it does not know, and flags come and go with every jaxlib. So flags are tried in a process of
their own first: all together, and only if that fails, one by one. Unknown flags are left out with a warning. A trial takes a second; its
result is stored beside the compiled programs, for this jaxlib and these flags, so that later starts skip it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax

from jgt.document import InputError

from ..config import Config
from ..files.sealed import DamagedError, default_folder, own_folder, read_sealed, write_sealed
from ..processes.compiled import open_programs, use_programs

_PIPELINE = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    "xla_gpu_all_gather_combine_threshold_bytes": str(1 << 30),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(1 << 30),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(1 << 27),
}
"""Overlap of collectives with compute, from NVIDIA's JAX-Toolbox (docs/GPU_performance.md) and JAX's GPU performance tips."""
# The first two make a second copy of a loop's body, or of a part of it. The loop over a pipeline's ticks has the whole step as its body.
# With the third, a gather between hosts runs beside a collective of the GPUs of one host.
_OVERLAP = {
    **_PIPELINE,
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_while_loop_double_buffering": "true",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
}
# Triton's matmuls would convert operands of eight bits to sixteen; cuBLASLt multiplies them directly.
_FP8 = {"xla_gpu_enable_triton_gemm": "false"}

PRESETS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "gpu-overlap": _OVERLAP,
    "gpu-pipeline": _PIPELINE,
    "gpu-fp8": {**_OVERLAP, **_FP8},
}
# Two names of one variable. JAX refuses an environment that has both.
_MEMORY = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
# The least that makes XLA parse XLA_FLAGS.
_PROBE = "from jaxlib import _jax; _jax.CompileOptions()"


def configure_xla(config: Config, *, is_from_file: bool = False) -> list[str]:
    """Sets XLA's flags and the compilation cache of a run. Must be called before JAX starts its devices. Returns warnings for a person.

    Flags in the environment's XLA_FLAGS remain and win, and so does a share of a GPU's memory that the environment has.
    is_from_file: whether a file names the cache, which then may have a stranger's programs.
    """
    _add_threads(config)
    has_gpu = config.devices.virtual_cpu is None and any(Path("/dev").glob("nvidia[0-9]*"))
    if has_gpu and _MEMORY.isdisjoint(os.environ):
        # JAX itself would take 75 %, and a plan says that a step fits if it needs at most this share.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"
    inherited = os.environ.get("XLA_FLAGS", "").split()
    flags = _texts(wanted_flags(config, has_gpu=has_gpu), inherited)
    cache = config.xla.cache
    folder, warnings = (None, []) if cache is None else _open_cache(cache, is_from_file)
    accepted = _accepted_flags(flags, folder)
    if accepted:
        os.environ["XLA_FLAGS"] = " ".join([*accepted, *inherited])
    return [*_left_out(flags, accepted), *warnings]


def _add_threads(config: Config) -> None:
    """Gives XLA more threads for virtual devices whose program has many collectives that do not depend on each other.

    XLA runs such collectives of a device side by side, and each blocks a thread of a pool that all devices share. The pool has a thread for
    each device. If some devices block several, none may be left for the last device, and all wait until XLA aborts the process. An exchange
    in int8 has two collectives for each array. More threads cost other steps a tenth of their speed, so only these runs get them.
    """
    sync, count = config.sync, config.devices.virtual_cpu
    if sync is not None and sync.wire == "int8" and count is not None:
        # XLA reads this variable for the size of the pool.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * count)))


def wanted_flags(config: Config, *, has_gpu: bool) -> dict[str, str]:
    """The flags of a run by name: its preset's, and its own. has_gpu: whether its devices are NVIDIA's."""
    preset, fp8 = config.xla.preset, {}
    if preset == "auto":
        preset = "none" if not has_gpu else "gpu-overlap" if config.pipeline is None else "gpu-pipeline"
        fp8 = _FP8 if has_gpu and config.model.fp8 else {}
    return {**PRESETS[preset], **fp8, **config.xla.plain_flags()}


def planned_flags(config: Config, *, has_gpu: bool) -> tuple[dict[str, str], list[str]]:
    """The flags of a run whose devices are elsewhere, as far as the installed XLA accepts them, and warnings for a person.

    Flags in the environment's XLA_FLAGS win, because XLA has them already.
    """
    flags = _texts(wanted_flags(config, has_gpu=has_gpu), os.environ.get("XLA_FLAGS", "").split())
    folder = None
    with contextlib.suppress(RuntimeError, OSError):
        folder = default_folder()
    accepted = _accepted_flags(flags, folder)
    return {_name(flag): flag.partition("=")[2] for flag in accepted}, _left_out(flags, accepted)


def open_devices() -> None:
    """Makes JAX open its devices. Raises InputError if JAX_PLATFORMS names a platform that JAX does not know, and OSError if that fails."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX asserts that a platform of JAX_PLATFORMS has its plugin.
        reason = next(iter(str(error).splitlines()), "")
        # JAX has one type of error for a typo and for a device that is busy, of which only the second may pass.
        if "known backends" in reason:
            raise InputError([f"environment: JAX_PLATFORMS: {reason}"]) from None
        raise OSError(f"JAX cannot open its devices: {reason or 'a platform of JAX_PLATFORMS is not installed'}") from error


def _texts(flags: Mapping[str, str], inherited: Sequence[str]) -> list[str]:
    """Flags as XLA_FLAGS has them, without those that are inherited."""
    known = {_present(_name(flag)) for flag in inherited}
    return [f"--{name}={value}" for name, value in flags.items() if _present(name) not in known]


def _left_out(flags: Sequence[str], accepted: Sequence[str]) -> list[str]:
    return [f"this XLA does not accept {flag}; it is left out" for flag in flags if flag not in accepted]


def _accepted_flags(flags: list[str], folder: Path | None) -> list[str]:
    """The flags that the installed XLA accepts. folder: where the answer is stored for the next start."""
    if not flags:
        return []
    question = "\n".join([metadata.version("jaxlib"), *flags])
    note = None if folder is None else folder / f"flags-{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    if note is not None:
        with contextlib.suppress(OSError, DamagedError):
            lines = read_sealed(note).decode().splitlines()
            return [flag for flag in flags if flag in lines]
    accepted = flags if _is_accepted(flags) else [flag for flag in flags if _is_accepted([flag])]
    if note is not None:
        with contextlib.suppress(OSError):
            write_sealed(note, "\n".join(accepted).encode())
    return accepted


def _is_accepted(flags: list[str]) -> bool:
    # On the CPU, so that the trial leaves the accelerators alone.
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, check=False).returncode == 0


def _name(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--")


def _present(name: str) -> str:
    """The name that XLA has for a flag since jaxlib 0.11, which knows the former names of pipelined collectives too."""
    return name.replace("_enable_pipelined_", "_pipeline_")


def _open_cache(cache: str, is_from_file: bool) -> tuple[Path | None, list[str]]:
    """The folder of `xla.cache`, which JAX then uses, and warnings; None if it cannot be used."""
    again = "Every start compiles again"
    try:
        folder, key = default_folder() if cache == "auto" else Path(cache), b""
        if is_from_file and cache != "auto":
            folder, key = own_folder(folder)
        programs = open_programs(folder, key)
    except RuntimeError:
        # An id without an entry in the list of users, as a container may have.
        return None, [f"compiled programs cannot be stored, because this user has no home folder. {again}. Set HOME or xla.cache"]
    except OSError as error:
        return None, [f"compiled programs cannot be stored in {error.filename}: {error.strerror or error}. {again}"]
    if not use_programs(programs):
        return folder, [f"compiled programs are not stored, because they cannot be checked with this version of JAX. {again}"]
    return folder, []
