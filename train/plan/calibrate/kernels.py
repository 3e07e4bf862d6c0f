"""Small programs of one kind of work each: matmuls, memory, launches and collectives.

Each repeats its work in a loop, so that a run takes milliseconds, and each result is an operand of the next: nothing can be left out. The
devices do the same work at the same time: devices that share a processor are slower together than alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

_AXIS = "device"
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_while_loop_double_buffering": True}
"""Without it, a GPU copies in each trip what a loop carries. The trainer's runs on GPUs have it, too."""
_RUNS, _ROUNDS = 5, 3
"""A machine with other work is slow for seconds or minutes. So rounds of runs are far apart, and the fastest run counts."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the programs for a kind of device.

    matmuls: n of [n, n] by element type. memory: a number of f32. sent: the bytes on one device of a small and of a large collective.
    launches: the kernels in a run; 0 for CPUs, where XLA compiles such a loop into one function. flops, num_bytes: the work of a run.
    """

    matmuls: dict[str, int]
    memory: int
    sent: tuple[int, int]
    launches: int
    flops: float
    num_bytes: float


CPU_SIZES = Sizes(matmuls={"f32": 1024, "bf16": 256}, memory=1 << 22, sent=(1 << 12, 1 << 23), launches=0, flops=4e9, num_bytes=1e8)
GPU_SIZES = Sizes(matmuls={"f32": 4096, "bf16": 8192}, memory=1 << 27, sent=(1 << 12, 1 << 27), launches=3000, flops=2e13, num_bytes=2e10)


class Kernel(NamedTuple):
    """A program that repeats one kind of work `trips` times. run: runs it once."""

    name: str
    trips: int
    run: Callable[[], object]


def measure(kernels: Iterable[Kernel], say: Callable[[str], None]) -> dict[str, float]:
    """The seconds of the work of each program, by its name. say: prints a line for each."""
    found: dict[str, float] = {}
    rounds = [*kernels] * _ROUNDS
    for number, (name, trips, run) in enumerate(rounds, start=1):
        jax.block_until_ready(run())
        for _ in range(_RUNS):
            start = time.perf_counter()
            jax.block_until_ready(run())
            found[name] = min(found.get(name, float("inf")), (time.perf_counter() - start) / trips)
        say(f"{number:3} of {len(rounds)} {found[name] * 1e6:14,.1f} us  {name}")
    return found


def kernels(devices: Sequence[Any], sizes: Sizes) -> Iterator[Kernel]:
    """Programs of all kinds of work, on these devices. Their names are those that `figures.calibrated` reads."""
    mesh = Mesh(np.array(devices), (_AXIS,))
    for dtype, n in sizes.matmuls.items():
        # The scale keeps the values of the loop near 1: a CPU is slow with very small ones.
        x = _normal((n, n), dtype)
        yield _kernel(mesh, f"matmul {dtype}", sizes.flops / len(devices) / (2 * n**3), jnp.matmul, x, x * x.dtype.type(n**-0.5))
    # A kernel that reads and writes its array once, and kernels that do nearly nothing.
    yield _kernel(mesh, "memory", sizes.num_bytes / (8 * sizes.memory), _add, _normal((sizes.memory,), "f32"))
    if sizes.launches:
        yield _kernel(mesh, "launch", sizes.launches, _sum, _normal((8,), "f32"))
    for which, num_bytes in zip(("small", "large"), sizes.sent if len(devices) > 1 else (), strict=False):
        x = _normal((max(num_bytes // 4 // mesh.size, 1) * mesh.size,), "f32")
        for kind, send in (("all-gather", _gather), ("collective-permute", _rotate)):
            yield _kernel(mesh, f"{which} {kind}", min(sizes.num_bytes / (2 * num_bytes), 100), send, x)


def _add(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x) + 0.5


def _sum(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x * 0.5)


def _gather(x: jax.Array) -> jax.Array:
    # One part of what comes from all devices: XLA must not know which.
    size = jax.lax.axis_size(_AXIS)
    whole = cast(jax.Array, jax.lax.all_gather(x.reshape(-1)[: x.size // size], _AXIS))
    return whole.reshape(x.shape) * 0.5


def _rotate(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


def _normal(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype({"f32": "float32", "bf16": "bfloat16"}[dtype])


def _kernel(mesh: Mesh, name: str, trips: float, once: Callable[..., jax.Array], x: np.ndarray, *others: np.ndarray) -> Kernel:
    """`once`, again and again on its own result, on every device of the mesh, each with its own x."""
    trips = int(min(max(trips, 2), 3000))
    split, whole = NamedSharding(mesh, jax.P(_AXIS)), NamedSharding(mesh, jax.P())

    def local(x: jax.Array, *others: jax.Array) -> jax.Array:
        def trip(_: int, x: jax.Array) -> jax.Array:
            return once(x, *others)

        return cast(jax.Array, jax.lax.fori_loop(0, trips, trip, x[0]))[None]

    arrays = jax.device_put(np.stack([x] * mesh.size), split), *[jax.device_put(other, whole) for other in others]
    specs = (jax.P(_AXIS), *[jax.P()] * len(others))
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P(_AXIS), check_vma=False))
    return Kernel(name, trips, partial(program.lower(*arrays).compile(_OPTIONS), *arrays))
