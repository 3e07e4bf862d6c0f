"""Random layouts of matmuls, convolutions, gathers, updates, loops and small models through `jgt.shard`: does any compute another number?

    python benchmarks/random_layouts.py --layouts 20000             # with the faults of XLA's partitioner avoided
    python benchmarks/random_layouts.py --layouts 2000 --faults     # as XLA computes them
    python benchmarks/random_layouts.py --layouts 5000 --axes 4     # on the mesh with four axes alone

Each layout gives random specs to the parameters, the inputs, the named tensors and the result of one function, on one of five meshes with
two to four axes. Values and all gradients are compared with those of the plain function. Layouts that XLA refuses to compile, or of which
its compiler dies, are counted apart: they are not silent. A program has many layouts, each in a signal of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.tracing import tensor_name
from jgt.sharding.partitioner import avoided_faults, with_faults
from jgt.signal import tensor

MESHES = [*[{"d": 2, "f": 2, "t": 2}] * 4, {"d": 2, "t": 4}, {"d": 4, "t": 2}, {"d": 2, "f": 2, "t": 2, "s": 2}, {"d": 2, "f": 4, "t": 2}]
TOLERANCE = 1e-4
"""Of the largest number of an array. Wrong layouts are off by half of it and more."""


def functions():
    """By name: a function of parameters and an input, whose values are named tensors, with the shapes of both."""

    def einsum(text):
        return lambda p, x: jnp.einsum(text, tensor(x, "x"), tensor(p["w"], "w"))

    def conv(**options):
        def apply(p, x):
            dims = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(tensor(x, "x"), tensor(p["w"], "w"), dimension_numbers=dims, **options)

        return apply

    def mlp(p, x):
        return tensor(jnp.tanh(x @ p["w"]), "x") @ p["v"]

    def layers(p, x):
        return lax.scan(lambda h, w: (tensor(jnp.tanh(h @ w), "x"), None), x, p["w"])[0]

    def attention(p, x):
        q, k, v = (tensor(jnp.einsum("bsd,dhk->bshk", x, p[name]), name) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        return jnp.einsum("bshk,hkd->bsd", tensor(jnp.einsum("bhst,bthk->bshk", scores, v), "x"), p["o"])

    same = {"padding": "SAME", "window_strides": (1, 1)}
    image = (8, 8, 8, 8)
    return {
        "matmul": (einsum("mk,kn->mn"), {"w": (16, 8)}, (8, 16)),
        "rows": (einsum("bsk,kn->bsn"), {"w": (16, 8)}, (8, 8, 16)),
        "batched": (einsum("bmk,bkn->bmn"), {"w": (8, 16, 8)}, (8, 8, 16)),
        "heads": (einsum("bsd,dhk->bshk"), {"w": (8, 8, 8)}, (8, 8, 8)),
        "two sums": (einsum("bshd,hde->bse"), {"w": (8, 8, 8)}, (8, 8, 8, 8)),
        "three sums": (einsum("abck,abcn->kn"), {"w": (8, 8, 4, 8)}, (8, 8, 4, 8)),
        "conv": (conv(**same), {"w": (3, 3, 8, 8)}, image),
        "strided": (conv(padding="SAME", window_strides=(2, 2)), {"w": (3, 3, 8, 8)}, image),
        "dilated": (conv(**same, rhs_dilation=(2, 2)), {"w": (3, 3, 8, 8)}, image),
        "depthwise": (conv(**same, feature_group_count=8), {"w": (3, 3, 1, 8)}, image),
        "grouped": (conv(**same, feature_group_count=4), {"w": (3, 3, 2, 8)}, image),
        "transposed": (conv(padding=((1, 2), (1, 2)), window_strides=(1, 1), lhs_dilation=(2, 2)), {"w": (3, 3, 8, 8)}, (8, 4, 4, 8)),
        "pooled": (lambda p, x: lax.reduce_window(x * p["w"], -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"), {"w": (8,)}, image),
        "embedding": (lambda p, x: p["w"][(jnp.abs(x) * 7).astype(jnp.int32) % 16], {"w": (16, 8)}, (8, 8)),
        "lookup": (lambda p, x: p["w"][(jnp.abs(x) * 7).astype(jnp.int32) % 16], {"w": (16, 8)}, (8,)),
        "cumulative": (lambda p, x: lax.associative_scan(jnp.add, tensor(x * p["w"], "x"), axis=1), {"w": (8,)}, (8, 8, 8)),
        **row_functions(),
        "mlp": (mlp, {"w": (8, 16), "v": (16, 8)}, (16, 8)),
        "layers": (layers, {"w": (3, 8, 8)}, (8, 8)),
        "attention": (attention, {"q": (8, 4, 8), "k": (8, 4, 8), "v": (8, 4, 8), "o": (4, 8, 8)}, (8, 8, 8)),
    }


def row_functions():
    """Those of the rows [16, 8] whose faults no layout mends."""

    def rows(change):
        """A change of rows [16, 8]."""
        return lambda p, x: change(tensor(jnp.tanh(x * p["w"]), "x")), {"w": (8,)}, (16, 8)

    def sliced(start):
        # XLA must not know the start.
        return rows(lambda h: lax.dynamic_slice_in_dim(h, jnp.where(h[0, 0] > -2, start, 0), 8, 0))

    def updated(start, size):
        return rows(lambda h: lax.dynamic_update_slice_in_dim(h, 2 * h[:size], jnp.where(h[0, 0] > -2, start, 0), 0))

    def with_nan(reduce):
        """The fourth row has a NaN. Gradients are left out, because XLA computes 0 * NaN as 0 on one device, too."""
        return rows(lambda h: reduce(jnp.where(jnp.arange(16 * 8).reshape(16, 8) == 29, jnp.nan, lax.stop_gradient(h))))

    groups = np.arange(16) % 3
    return {
        "shift and fill": rows(lambda h: h.at[:-1].set(h[1:]).at[-1].set(0.0)),
        "shift and add": rows(lambda h: h.at[:, 1:].set(h[:, :-1]).at[:, 0].add(2.0)),
        "row of a concatenation": rows(lambda h: jnp.concatenate([h[1:], h[:1]]).at[-1].set(0.0)),
        "row of a sorted array": rows(lambda h: jnp.sort(h, 0).at[3].multiply(2.0)),
        "row of a roll": rows(lambda h: jnp.roll(h, jnp.where(h[0, 0] > -2, 3, 0), 0).at[-1].max(0.1)),
        "shift of each row": rows(jax.vmap(lambda r: r.at[:-1].set(r[1:]).at[-1].set(0.0))),
        "slice before the beginning": sliced(-20),
        "slice beyond the end": sliced(13),
        "update beyond the end": updated(14, 4),
        "row beyond the end": updated(16, 1),
        "row before the beginning": updated(-20, 1),
        "indexed beyond the end": rows(lambda h: h * h[jnp.where(h[0, 0] > -2, 20, 0)][None]),
        "cumulative maximum": rows(lambda h: lax.cummax(h, 0)),
        "maximum of a NaN": with_nan(lambda h: jnp.max(h, 0)),
        "minimum of a NaN": with_nan(jnp.min),
        "segments of a NaN": with_nan(lambda h: jax.ops.segment_max(h, groups, 4)),
        "update with itself": rows(lambda h: tensor(2 * h, "y").at[1:].set(tensor(2 * h, "y")[:-1])),
        "row of a window": rows(jax.vmap(lambda r: lax.dynamic_slice_in_dim(r, jnp.where(r[0] > -2, 7, 0), 2)[jnp.where(r[0] > -2, 3, 0)])),
        "slice beside its array": rows(lambda h: tensor(h[:-1, :7], "y").sum() + (tensor(h * 3, "z") ** 2).sum() + h.at[:15].mul(h[:15])),
        "padded scatter": rows(lambda h: lax.sort_key_val(jnp.pad(h, ((0, 0), (2, 1))), jnp.pad(h, ((0, 0), (1, 2))), dimension=0)[1]),
    }


def spec(rng, shape, mesh):
    """A random spec whose axes divide the shape."""
    axes, dims = list(mesh), [[] for _ in shape]
    rng.shuffle(axes)
    for axis in axes:
        fits = [d for d, size in enumerate(shape) if size % (mesh[axis] * _product(mesh[a] for a in dims[d])) == 0]
        if fits and rng.random() < 0.75:
            dims[rng.choice(fits)].append(axis)
    return [d or None for d in dims]


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


def tensors_of(fn, params, x):
    """The shapes of a function's named tensors."""
    found = {}

    def walk(program):
        for equation in jx.body(program).eqns:
            if name := tensor_name(equation):
                found[name] = jx.shape_of(equation.outvars[0])
            for inner in subprograms(equation):
                walk(inner)

    walk(jax.make_jaxpr(fn)(params, x))
    return found


def error_of(found, expected):
    """The largest difference, as a share of the largest number; infinite where only one has a NaN."""
    real = ~np.isnan(expected)
    if not np.array_equal(real, ~np.isnan(found)):
        return np.inf
    return float(np.max(np.abs(found - expected), initial=0.0, where=real) / (np.max(np.abs(expected), initial=0.0, where=real) or 1.0))


def run_programs(name, seeds, count, meshes, keeps_faults):
    """Compiles `count` layouts of one function in one program for each seed, and prints what came out as JSON."""
    fn, shapes, of_x = functions()[name]
    draw = np.random.default_rng(0)
    params = {key: draw.standard_normal(shape, np.float32) for key, shape in shapes.items()}
    x = draw.standard_normal(of_x, np.float32)
    out = jax.eval_shape(fn, params, x)
    cotangent = jnp.asarray(draw.standard_normal(out.shape, np.float32))
    # Operation by operation: XLA computes some programs wrongly on one device, too.
    expected = fn(params, jnp.asarray(x)), *jax.vjp(fn, params, x)[1](cotangent)
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
    tensors = tensors_of(fn, params, x)
    numbers = [f"{n}" for n in range(count)]

    def many(p, x):
        results = []
        for n in numbers:
            with jgt.signal.context(f"layout{n}"):
                results.append(fn({key: value[n] for key, value in p.items()}, x[n]))
        return results

    for seed in seeds:
        rng = random.Random(seed)
        sizes = rng.choice(meshes)
        signals = {
            f"layout{n}": {
                "params": {f"{key}/{n}": spec(rng, shape[1:] if name == "layers" else shape, sizes) for key, shape in shapes.items()},
                "tensors": {key: spec(rng, shape, sizes) for key, shape in tensors.items() if rng.random() < 0.7},
                "out": spec(rng, out.shape, sizes),
            }
            for n in numbers
        }
        inputs = {n: spec(rng, of_x, sizes) for n in numbers}
        mesh = jgt.make_mesh(sizes, devices=jax.devices()[: _product(sizes.values())])
        sharded = jgt.shard(many, jgt.make_rules({"signals": signals, "inputs": inputs, "default": "replicate"}), mesh, partial=True)

        def run(p, x, sharded=sharded):
            results, pull = jax.vjp(sharded, p, x)
            return results, *pull([cotangent] * count)

        arguments = {key: dict.fromkeys(numbers, value) for key, value in params.items()}, dict.fromkeys(numbers, x)
        with avoided_faults() as avoided, with_faults() if keeps_faults else contextlib.nullcontext():
            try:
                found = jax.jit(run)(*arguments)
            except jax.errors.JaxRuntimeError as error:
                print(json.dumps({"refused": str(error)[:300]}), flush=True)
                continue
        wrong = []
        for n in numbers:
            mine = found[0][int(n)], {key: value[n] for key, value in found[1].items()}, found[2][n]
            error = max(map(error_of, map(np.asarray, jax.tree.leaves(mine)), expected))
            if error > TOLERANCE:
                wrong.append([error, signals[f"layout{n}"], inputs[n]])
        changed = {match for a in avoided for match in re.findall(r"layout\d+", a.name)}
        print(json.dumps({"mesh": sizes, "wrong": wrong, "changed": len(changed)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=int, default=24, help="layouts in one program")
    parser.add_argument("--axes", type=int, choices=(2, 3, 4), help="the meshes with this number of axes alone")
    parser.add_argument("--faults", action="store_true", help="leave the faults in")
    parser.add_argument("--only", help="one function")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "SEEDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        meshes = [sizes for sizes in MESHES if options.axes in (None, len(sizes))]
        run_programs(options.run[0], json.loads(options.run[1]), options.program, meshes, options.faults)
        return
    # XLA's partitioner is the same without what takes the most time for small programs.
    flags = [
        "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib") < "0.11" else "",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "3"}
    totals, seed, started = collections.Counter(), options.seed, time.perf_counter()
    names = [options.only] if options.only else list(functions())
    for name in itertools.cycle(names):
        if totals["layouts"] >= options.layouts:
            break
        seeds = list(range(seed, seed + 10))
        seed += 10
        command = [sys.executable, __file__, "--program", str(options.program), "--run", name, json.dumps(seeds)]
        command += ["--axes", str(options.axes)] if options.axes else []
        done = subprocess.run(command + ["--faults"] * options.faults, check=False, capture_output=True, text=True, env=environment)
        for line in done.stdout.splitlines():
            found = json.loads(line)
            if "refused" in found:
                totals["layouts in programs that XLA refuses"] += options.program
                print(f"refused: {name}: {found['refused']}", flush=True)
                continue
            totals["layouts"] += options.program
            totals["changed"] += found["changed"]
            totals["wrong"] += len(found["wrong"])
            totals[f"wrong: {name}"] += len(found["wrong"])
            for error, rules, inputs in found["wrong"]:
                print(f"wrong by {error:.2f}: {name} {found['mesh']} {rules} inputs {inputs}", flush=True)
        if done.returncode < 0:
            totals["layouts in programs that XLA's compiler dies of"] += options.program
            print(f"died: {name} after {len(done.stdout.splitlines())} programs of seeds {seeds}", flush=True)
        elif done.returncode:
            raise SystemExit(done.stderr)
    print(json.dumps({key: value for key, value in totals.items() if value} | {"seconds": round(time.perf_counter() - started)}, indent=1))


if __name__ == "__main__":
    main()
