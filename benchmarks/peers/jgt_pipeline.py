"""Gradients of a llama pipelined by jgt, with the schedules in turn.

`python jgt_pipeline.py SIZES WEIGHTS`, with SIZES as `peers.py` passes them, prints JSON: for each schedule, CPU-seconds and seconds per
step (medians), the loss and the norm of the gradient. If the file WEIGHTS does not exist, the program only writes it, with the parameters
and the tokens [batch, seq + 1].
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SIZES, WEIGHTS = json.loads(sys.argv[1]), Path(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={SIZES['devices']} {os.environ.get('XLA_FLAGS', '')}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jgt  # noqa: E402
from benchmarks.harness import ROOT, interleave, spread  # noqa: E402
from train.models.config import ModelConfig  # noqa: E402
from train.models.decoder import build  # noqa: E402
from train.setup.remat import with_remat_of  # noqa: E402
from train.step.loss import make_loss  # noqa: E402

KEPT = ", kept"
"""The end of a schedule's name if no layer is recomputed, so that all activations for the backward pass are kept."""
NO_STAGES = "no stages"
"""In place of a schedule: no pipeline. The axis `data` gets the devices of `stage`, so that all devices share the batch."""
KEYS = ("layers", "embed", "heads", "kv_heads", "ffn", "vocab", "seq")


def main() -> None:
    """Prints the figures, or writes the file of weights."""
    config = ModelConfig(kind="llama", **{key: SIZES[key] for key in KEYS})
    if not WEIGHTS.exists():
        params = jax.tree_util.tree_flatten_with_path(jax.jit(build(config).init)(jax.random.key(0))[0])[0]
        tokens = np.random.default_rng(0).integers(SIZES["vocab"], size=(SIZES["batch"], SIZES["seq"] + 1), dtype=np.int32)
        np.savez(WEIGHTS, tokens=tokens, **{_name(path): np.asarray(value) for path, value in params})
        return
    model = build(config)
    programs = {
        name: Program(model, name.removesuffix(KEPT), remat="none" if name.endswith(KEPT) else "block") for name in SIZES["schedules"]
    }
    samples = interleave(programs, SIZES["steps"])
    found = {
        name: {kind: spread(getattr(s, kind) for s in samples[name])["median"] for kind in ("cpu_s", "s")} | program.results()
        for name, program in programs.items()
    }
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    print(json.dumps({"schedules": found, "parameters": next(iter(programs.values())).num_parameters, "versions": versions}))


class Program:
    """The compiled loss and gradient of a schedule, for the weights and tokens of the file. Each call waits for its results."""

    def __init__(self, model: Any, schedule: str, *, remat: str):
        weights, (batch, seq) = np.load(WEIGHTS), (SIZES["batch"], SIZES["seq"])
        tokens = weights["tokens"]
        data = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.full((batch, seq), 1 / (batch * seq), np.float32)}
        axes, pipeline = {"data": 1, "tensor": 1, **SIZES["mesh"]}, None
        if schedule == NO_STAGES:
            axes |= {"data": axes["stage"], "stage": 1}
        else:
            pipeline = jgt.Pipeline(signal="layers", schedule=schedule, microbatches=SIZES["microbatches"])
        rules, mesh = jgt.load_rules(ROOT / "configs/rules/pipeline.yaml"), jgt.make_mesh(axes)
        of_module = make_loss(lambda module, tokens: module.features(tokens))
        plain = lambda params, batch: model.run(lambda module: of_module(module, batch), params, {}, True)[0]  # noqa: E731
        loss = jgt.shard(with_remat_of(plain, remat, None, "here"), rules, mesh, pipeline=pipeline)
        place = jgt.place(loss, rules, mesh, jax.eval_shape(model.init, jax.random.key(0))[0], data, pipeline=pipeline)
        self._params = jax.tree_util.tree_map_with_path(lambda path, to: jax.device_put(weights[_name(path)], to), place.params)
        self._data = jax.device_put(data, place.inputs(data))
        self._step = jax.jit(jax.value_and_grad(loss), out_shardings=(place.replicated(), place.gradients))
        self._found: Any = None

    def __call__(self) -> None:
        self._found = jax.block_until_ready(self._step(self._params, self._data))

    @property
    def num_parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self._params))

    def results(self) -> dict[str, float]:
        loss, gradients = self._found
        return {"loss": float(loss), "grad_norm": float(optax.global_norm(gradients))}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


if __name__ == "__main__":
    main()
