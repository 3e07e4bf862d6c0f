"""Attention on a split sequence beside attention on one device: CPU-seconds of a training step, and the memory of longer sequences.

    python benchmarks/context.py [--seq 512] [--devices 4]

The steps alternate, and the ratio is the median over pairs. Memory is the temporary memory of a device that XLA reports for a ring, while
the sequence and the number of devices double together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

import jgt
from jgt import signal

METHODS = (("ring", "zigzag"), ("ring", "plain"), ("gather", "plain"), ("ulysses", None))


def loss(params, batch):
    with signal.context("attn"):
        q, k, v = (signal.tensor(jnp.einsum("bsd,dnh->bsnh", batch, params[name]), name) for name in "qkv")
        heads = signal.tensor(jax.nn.dot_product_attention(q, k, v, is_causal=True), "heads")
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
    plain = step_of(None, None, 1, *args)
    for method, order in METHODS:
        split = step_of(method, order, options.devices, *args)
        placed = jax.device_put(args, split.input_shardings[0])
        seconds(plain, args), seconds(split, placed)
        ratios = [seconds(split, placed) / seconds(plain, args) for _ in range(15)]
        print(f"{method} {order or ''}: {statistics.median(ratios):.2f} x the CPU-seconds of one device", flush=True)
    for devices in (2, 4, 8):
        seq = options.seq * devices // 2
        memory = step_of("ring", "zigzag", devices, *arguments(seq, batch=1)).memory_analysis()
        print(f"ring on {devices} devices, {seq} positions: {memory.temp_size_in_bytes / 1e6:.2f} MB of temporary memory each", flush=True)


main()
