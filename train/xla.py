"""XLA's flags and its cache of compiled programs, both set before JAX starts its devices.

XLA aborts the whole process for a flag that it does not know, and flags come and go with every jaxlib. So flags are tried in a process of
their own first: all together, and only if that fails, one by one. Unknown flags are left out with a warning. A trial takes a second; its
result is stored beside the compiled programs, for this jaxlib and these flags, so that later starts skip it.

Compiled programs are stored so that a restart does not compile again. The folder may grow to 10 GiB; then the oldest programs go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import jax

from jgt.document import InputError
from train.sections import XlaConfig

_OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    "xla_gpu_enable_while_loop_double_buffering": "true",
    "xla_gpu_all_gather_combine_threshold_bytes": str(1 << 30),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(1 << 30),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(1 << 27),
}
"""Overlap of collectives with compute, from NVIDIA's JAX-Toolbox (docs/GPU_performance.md) and JAX's GPU performance tips."""

PRESETS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "gpu-overlap": _OVERLAP,
    # Triton's matmuls would convert operands of eight bits to sixteen; cuBLASLt multiplies them directly.
    "gpu-fp8": {**_OVERLAP, "xla_gpu_enable_triton_gemm": "false"},
}
# The least that makes XLA parse XLA_FLAGS.
_PROBE = "from jaxlib import _jax; _jax.CompileOptions()"
_LARGEST_CACHE = 10 * 2**30
# The ends of the names that JAX gives its files.
_ENDS = ("-cache", "-atime")


def configure_xla(config: XlaConfig, *, virtual: bool, fp8: bool = False) -> list[str]:
    """Sets XLA's flags and the compilation cache. Must be called before JAX starts its devices. Returns warnings for a person.

    virtual: the devices are virtual CPU devices. fp8: the model has matmuls in eight bits. Flags in the environment's XLA_FLAGS remain
    and win.
    """
    wanted = {**PRESETS[_preset(config, virtual=virtual, fp8=fp8)], **config.plain_flags()}
    inherited = os.environ.get("XLA_FLAGS", "").split()
    flags = [f"--{name}={value}" for name, value in wanted.items() if not any(_name(flag) == name for flag in inherited)]
    warnings = []
    folder = None
    if config.cache is not None:
        try:
            folder = Path(config.cache) if config.cache != "auto" else _default_cache()
            _open_cache(folder)
        except OSError as error:
            folder = None
            warnings.append(
                f"compiled programs cannot be stored in {error.filename}: {error.strerror or error}. Every start compiles again"
            )
    accepted = _accepted_flags(flags, folder)
    if accepted:
        os.environ["XLA_FLAGS"] = " ".join([*accepted, *inherited])
    return [*(f"this XLA does not accept {flag}; it is left out" for flag in flags if flag not in accepted), *warnings]


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


def _preset(config: XlaConfig, *, virtual: bool, fp8: bool) -> str:
    if config.preset != "auto":
        return config.preset
    if virtual or not any(Path("/dev").glob("nvidia[0-9]*")):
        return "none"
    return "gpu-fp8" if fp8 else "gpu-overlap"


def _accepted_flags(flags: list[str], folder: Path | None) -> list[str]:
    """The flags that the installed XLA accepts. folder: where the answer is stored for the next start."""
    if not flags or folder is None:
        return list(_try_flags(flags))
    question = "\n".join([metadata.version("jaxlib"), *flags])
    note = folder / f"flags-{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    with contextlib.suppress(OSError, ValueError):
        lines = note.read_text().splitlines()
        # Only flags that were asked for: the file may have been changed.
        return [flag for flag in flags if flag in lines]
    accepted = list(_try_flags(flags))
    with contextlib.suppress(OSError):
        # Written under another name first: other processes of the run may read the note now.
        written = note.with_name(f"{note.name}.{os.getpid()}")
        written.write_text("\n".join(accepted))
        written.replace(note)
    return accepted


def _try_flags(flags: list[str]) -> Iterator[str]:
    if not flags or _is_accepted(flags):
        yield from flags
    else:
        yield from (flag for flag in flags if _is_accepted([flag]))


def _is_accepted(flags: list[str]) -> bool:
    # On the CPU, so that the trial leaves the accelerators alone.
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, check=False).returncode == 0


def _name(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--")


def _open_cache(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _prune(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's default skips programs that compile in under a second. A start has a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _default_cache() -> Path:
    """A folder in the user's cache, one for each kind of CPU: a program compiled for one kind may use instructions that another lacks."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return base / "jgt" / "compiled" / f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _prune(folder: Path) -> None:
    """Removes the oldest programs of a cache that has grown too large. Files that are not JAX's stay: the folder may be the user's."""
    programs = (path for path in folder.iterdir() if path.name.endswith(_ENDS) and path.is_file())
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in programs)
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= _LARGEST_CACHE:
            return
        path.unlink(missing_ok=True)
        total -= size
