"""XLA's settings as data: flags by preset, tried out before they are used, and compiled programs kept for the next start."""

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
"""Collectives beside compute, as NVIDIA's JAX-Toolbox (docs/GPU_performance.md) and JAX's GPU performance tips have it."""

PRESETS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "gpu-overlap": _OVERLAP,
    # Triton's matmuls would convert eight bits to sixteen; cuBLASLt multiplies them as they are.
    "gpu-fp8": {**_OVERLAP, "xla_gpu_enable_triton_gemm": "false"},
}
_PROBE = "from jaxlib import _jax; _jax.CompileOptions()"
_LARGEST_CACHE = 10 * 2**30
_ENDS = ("-cache", "-atime")


def configure(config: XlaConfig, *, virtual: bool, fp8: bool = False) -> list[str]:
    """Sets XLA's flags and the compilation cache, before JAX starts its devices; what to tell a person.

    virtual: the devices are virtual CPU devices. fp8: the model has matmuls in eight bits. Flags of the environment's XLA_FLAGS stay, and win.
    """
    wanted = {**PRESETS[_preset(config, virtual=virtual, fp8=fp8)], **config.plain_flags()}
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = [f"--{name}={value}" for name, value in wanted.items() if not any(_name(flag) == name for flag in given)]
    warnings = []
    folder = None
    if config.cache is not None:
        try:
            folder = Path(config.cache) if config.cache != "auto" else _default_cache()
            _keep_programs(folder)
        except OSError as error:
            folder = None
            warnings.append(f"compiled programs are not kept in {error.filename}: {error.strerror or error}")
    known = _known(flags, folder)
    if known:
        os.environ["XLA_FLAGS"] = " ".join([*known, *given])
    return [*(f"XLA does not know {flag} here; it is left out" for flag in flags if flag not in known), *warnings]


def _preset(config: XlaConfig, *, virtual: bool, fp8: bool) -> str:
    if config.preset != "auto":
        return config.preset
    if virtual or not any(Path("/dev").glob("nvidia[0-9]*")):
        return "none"
    return "gpu-fp8" if fp8 else "gpu-overlap"


def _known(flags: list[str], folder: Path | None) -> list[str]:
    """The flags that the installed XLA takes: with another it would abort. The answer is kept in a folder for the next start."""
    if not flags or folder is None:
        return list(_tried(flags))
    question = "\n".join([metadata.version("jaxlib"), *flags])
    note = folder / f"flags-{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    with contextlib.suppress(OSError, ValueError):
        taken = note.read_text().splitlines()
        return [flag for flag in flags if flag in taken]
    known = list(_tried(flags))
    with contextlib.suppress(OSError):
        written = note.with_name(f"{note.name}.{os.getpid()}")
        written.write_text("\n".join(known))
        written.replace(note)
    return known


def _tried(flags: list[str]) -> Iterator[str]:
    if not flags or _is_taken(flags):
        yield from flags
    else:
        yield from (flag for flag in flags if _is_taken([flag]))


def _is_taken(flags: list[str]) -> bool:
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, check=False).returncode == 0


def _name(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--")


def _keep_programs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _prune(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Of the smallest too: a start has a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _default_cache() -> Path:
    """In the user's cache folder; programs for CPUs fit the kind of machine that compiled them."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return base / "jgt" / "compiled" / f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _prune(folder: Path) -> None:
    """Removes the oldest programs of a cache that has grown too large, and nothing that is none of JAX's."""
    programs = (path for path in folder.iterdir() if path.name.endswith(_ENDS) and path.is_file())
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in programs)
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= _LARGEST_CACHE:
            return
        path.unlink(missing_ok=True)
        total -= size
