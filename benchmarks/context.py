"""Attention on a split sequence beside attention on one device: CPU-seconds of a training step, and the memory of longer sequences.

    python benchmarks/context.py [--seq 512] [--devices 4]

The steps alternate, and the ratio is the median over pairs. `by hand` is the all-gather of keys and values in a shard_map, as MaxText has
it: the rows of the batch are in zigzag order ("load balanced"), and a device puts all keys into plain order and masks them for its
queries. Memory is the temporary memory of a device that XLA reports for a ring, while the sequence and the number of devices double
together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jgt
from jgt import signal

METHODS = (
    ("ring", "zigzag_rows"),
    ("ring", "zigzag"),
    ("ring", "plain"),
    ("gather", "zigzag_rows"),
    ("gather", "plain"),
    ("ulysses", None),
)


def attend_on_one_device(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def loss(params, batch, attend=attend_on_one_device):
    with signal.context("attn"):
        q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch, params[name]), name) for name in "qkv")
        heads = signal.tensor(attend(q, k, v), "heads")
    return jnp.mean((jnp.einsum("bsnh,nhd->bsd", heads, params["out"]) - batch) ** 2)


def arguments(seq, batch=4, d=256, n=8, g=4, h=64):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"q": (d, n, h), "k": (d, g, h), "v": (d, g, h), "out": (n, h, d)}
    params = {name: jax.random.normal(key, shape) / 16 for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    return params, jax.random.normal(keys[-1], (batch, seq, d))


def step_of(method, order, devices, *args):
    if method is None:
        return jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
    context = {"axis": "seq", "method": method, **({"order": order} if order else {})}
    rules = {"inputs": [None, "seq", "..."], "signals": {"attn": {"context": context}}, "default": "replicate"}
    mesh = jgt.make_mesh({"seq": devices}, devices=jax.devices()[:devices])
    return jax.jit(jax.value_and_grad(jgt.shard(loss, rules, mesh))).lower(*args).compile()


def step_by_hand(devices, params, batch):
    """The step with keys and values from an all-gather, for rows in zigzag order."""
    mesh = jgt.make_mesh({"seq": devices}, devices=jax.devices()[:devices])
    seq, parts = batch.shape[1], [part for i in range(devices) for part in (i, 2 * devices - 1 - i)]
    back, size = np.argsort(parts), seq // (2 * devices)

    def on_device(q, k, v):
        mine = jnp.array(parts).reshape(devices, 2)[jax.lax.axis_index("seq")]
        queries = (mine[:, None] * size + jnp.arange(size)[None, :]).reshape(-1)

        def of_all(x):
            whole = jax.lax.all_gather(x, "seq", axis=1, tiled=True)
            return whole.reshape(len(whole), 2 * devices, size, *whole.shape[2:])[:, back].reshape(whole.shape)

        mask = queries[:, None] >= jnp.arange(seq)[None, :]
        return jax.nn.dot_product_attention(q, of_all(k), of_all(v), mask=mask[None, None])

    attend = jax.shard_map(on_device, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    rows, whole = jax.NamedSharding(mesh, P(None, "seq")), jax.NamedSharding(mesh, P())
    step = jax.value_and_grad(lambda params, batch: loss(params, batch, attend))
    return jax.jit(step, in_shardings=(whole, rows), out_shardings=whole).lower(params, batch).compile()


def seconds(step, args):
    before = time.process_time()
    jax.block_until_ready(step(*args))
    return time.process_time() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args()
    args = arguments(options.seq)
    plain, by_hand = step_of(None, None, 1, *args), step_by_hand(options.devices, *args)
    theirs = jax.device_put(args, by_hand.input_shardings[0])
    for method, order in METHODS:
        split = step_of(method, order, options.devices, *args)
        placed = jax.device_put(args, split.input_shardings[0])
        times = [(seconds(split, placed), seconds(plain, args), seconds(by_hand, theirs)) for _ in range(16)][1:]
        alone, hand = (statistics.median(own / other[n] for own, *other in times) for n in range(2))
        print(f"{method} {order or ''}: {alone:.2f} x the CPU-seconds of one device, {hand:.2f} x those by hand", flush=True)
    for devices in (2, 4, 8):
        seq = options.seq * devices // 2
        memory = step_of("ring", "zigzag", devices, *arguments(seq, batch=1)).memory_analysis()
        print(f"ring on {devices} devices, {seq} positions: {memory.temp_size_in_bytes / 1e6:.2f} MB of temporary memory each", flush=True)


main()
