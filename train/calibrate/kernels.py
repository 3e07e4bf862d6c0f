"""Small programs of one kind of work each: matmuls, attention, memory, launches and collectives.

Each repeats its work in a loop, so that a run takes milliseconds, and each result is an operand of the next: nothing can be left out. The
devices do the same work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .measured import Program, RunOnce

_AXIS = "device"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What to measure on a kind of device.

    matmuls: [batch, m, k, n] by element type. attention: (batch, length, heads, head size). memory: numbers of f32. sent: bytes on one
    device. launches: of kernels, in a run; 0 for CPUs, where XLA compiles such a loop into one function. flops, num_bytes: of a run, by
    repetition.
    """

    matmuls: dict[str, tuple[tuple[int, int, int, int], ...]]
    attention: tuple[tuple[int, int, int, int], ...]
    memory: tuple[int, ...]
    sent: tuple[int, ...]
    launches: int
    flops: float
    num_bytes: float


CPU = Sizes(
    matmuls={
        "float32": (
            (1, 64, 64, 64),
            (1, 128, 256, 1024),
            (1, 512, 512, 2048),
            (1, 1024, 1024, 1024),
            (16, 128, 32, 128),
            (8, 256, 64, 256),
        ),
        "bfloat16": ((1, 256, 256, 1024),),
    },
    attention=(),
    memory=(1 << 12, 1 << 16, 1 << 20, 1 << 22),
    sent=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
    launches=0,
    flops=4e9,
    num_bytes=1e8,
)
GPU = Sizes(
    matmuls={
        "bfloat16": ((1, 512, 1024, 4096), (1, 2048, 2048, 8192), (1, 4096, 4096, 16384), (1, 8192, 8192, 8192), (32, 1024, 128, 1024)),
        "float32": ((1, 2048, 2048, 8192), (1, 4096, 4096, 4096)),
    },
    attention=((4, 2048, 16, 64), (4, 2048, 16, 128), (1, 8192, 16, 128)),
    memory=(1 << 16, 1 << 20, 1 << 24, 1 << 27),
    sent=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27),
    launches=3000,
    flops=2e13,
    num_bytes=2e10,
)


def kernels(devices: Sequence[Any], sizes: Sizes) -> Iterator[Program]:
    """Programs of all kinds of work, on these devices."""
    mesh = Mesh(np.array(devices), (_AXIS,))
    for dtype, shapes in sizes.matmuls.items():
        for shape in shapes:
            yield _matmul(mesh, dtype, shape, sizes.flops)
    for shape in sizes.attention:
        yield from _attention(mesh, shape, sizes.flops)
    for size in sizes.memory:
        yield _memory(mesh, size, sizes.num_bytes)
    if sizes.launches:
        yield _launches(mesh, sizes.launches)
    for num_bytes in sizes.sent if len(devices) > 1 else ():
        for kind, send in _SENT.items():
            yield _collective(mesh, kind, send, num_bytes, sizes.num_bytes)


def _matmul(mesh: Mesh, dtype: str, shape: tuple[int, int, int, int], flops: float) -> Program:
    """x times a matrix [k, n], and the result times one [n, k]: two matmuls of the same FLOPs."""
    batch, m, k, n = shape
    up, down = (_normal((batch, a, b), dtype, a**-0.5) for a, b in ((k, n), (n, k)))
    trips = _trips(flops / len(mesh.devices.flat), 4 * batch * m * k * n)

    def run(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: x @ up @ down, x)

    return _program(mesh, f"{dtype} [{batch}, {m}, {k}] x [{k}, {n}]", "matmul", run, _normal((batch, m, k), dtype, 1.0), up, down)


def _attention(mesh: Mesh, shape: tuple[int, int, int, int], flops: float) -> Iterator[Program]:
    """Fused attention, forward, and with its gradient."""
    batch, length, heads, head = shape
    trips = _trips(flops, 4 * batch * heads * length**2 * head)
    x = _normal((batch, length, heads, head), "bfloat16", 1.0)

    def attend(x: jax.Array) -> jax.Array:
        # [batch, length, heads, head size]
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: attend(x).astype(jnp.float32).sum())(x)

    for name, once in (("forward", attend), ("forward and backward", gradient)):

        def run(x: jax.Array, once: Callable[[jax.Array], jax.Array] = once) -> jax.Array:
            return jax.lax.fori_loop(0, trips, lambda _, x: once(x), x)

        try:
            program = _program(mesh, f"attention {shape}, {name}", "attention", run, x)
        except (ValueError, RuntimeError, NotImplementedError):
            # cuDNN does not have this kernel for this GPU.
            return
        yield program


def _memory(mesh: Mesh, size: int, num_bytes: float) -> Program:
    """An activation function: a kernel that reads and writes its array once."""
    trips = _trips(num_bytes, 8 * size)

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: jax.nn.silu(x) + 0.5, x)

    return _program(mesh, f"silu of f32[{size}]", "memory", run, _normal((size,), "float32", 1.0))


def _launches(mesh: Mesh, trips: int) -> Program:
    """Kernels that do nearly nothing."""

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: jnp.cumsum(x * 0.5), x)

    return _program(mesh, "cumsum of f32[8]", "launch", run, _normal((8,), "float32", 1.0))


def _mean(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, _AXIS)


def _gathered(x: jax.Array) -> jax.Array:
    # Of all parts, the next device's: which one it is, XLA does not know.
    size = jax.lax.axis_size(_AXIS)
    return jax.lax.all_gather(x.reshape(-1)[: x.size // size], _AXIS).reshape(x.shape) * 0.5


def _rotated(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


_SENT = {"all-reduce": _mean, "all-gather": _gathered, "collective-permute": _rotated}


def _collective(mesh: Mesh, kind: str, send: Callable[[jax.Array], jax.Array], num_bytes: int, most: float) -> Program:
    size = max(num_bytes // 4 // mesh.size, 1) * mesh.size
    trips = min(_trips(most, 2 * num_bytes), 100)

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, lambda _, x: send(x), x)

    return _program(mesh, f"{kind} of {num_bytes} bytes", "collective", run, _normal((size,), "float32", 1.0))


def _trips(most: float, each: float) -> int:
    """How many repetitions make up `most`, if each has this much work."""
    return int(min(max(most / each, 2), 3000))


def _normal(shape: Sequence[int], dtype: str, scale: float) -> np.ndarray:
    # The scales keep the values of a loop near 1: a CPU is slow with very small ones.
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype) * np.asarray(scale, dtype)


def _program(mesh: Mesh, name: str, kind: str, run: Callable[..., jax.Array], x: np.ndarray, *others: np.ndarray) -> Program:
    """`run(x, *others)` on every device of the mesh, each with its own x."""
    split, whole = NamedSharding(mesh, jax.P(_AXIS)), NamedSharding(mesh, jax.P())
    local = jax.shard_map(
        lambda x, *others: run(x[0], *others)[None],
        mesh=mesh,
        in_specs=(jax.P(_AXIS), *[jax.P()] * len(others)),
        out_specs=jax.P(_AXIS),
        check_vma=False,
    )

    def arrays() -> Sequence[jax.Array]:
        return jax.device_put(np.stack([x] * mesh.size), split), *[jax.device_put(other, whole) for other in others]

    def begin() -> RunOnce:
        given = arrays()
        return lambda: compiled(*given)

    compiled = jax.jit(local).lower(*arrays()).compile()
    return Program(name=name, kind=kind, compiled=compiled, mesh=dict(mesh.shape), begin=begin)
