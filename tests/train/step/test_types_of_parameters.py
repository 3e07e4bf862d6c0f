"""Models of one's own whose parameters are not f32 are trained as optax trains them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgt

RNG = np.random.default_rng(0)
SAMPLES = [{"x": RNG.normal(size=4).astype("f"), "y": RNG.normal(size=2).astype("f")} for _ in range(64)]
REPLICAS = {"mesh": {"replica": 2, "data": 4}, "rules": {"axes": {"batch": ["replica", "data"]}, "default": "replicate"}}
SYNCS = {
    "one": {"mesh": {"data": 1}},
    "phases": {**REPLICAS, "sync": {"axis": "replica", "every": 2, "outer": {"lr": 0.7, "momentum": 0.9}}},
    "fragments": {**REPLICAS, "sync": {"axis": "replica", "every": 2, "fragments": 2, "outer": {"lr": 0.7, "momentum": 0.9}}},
}


class Half(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x):
        return self.linear(x)


class Complex(nnx.Module):
    def __init__(self, *, rngs):
        self.z = nnx.Param(jnp.array(0, jnp.complex64))


def squares(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def distance(model, batch):
    return jnp.mean(batch["x"] * 0) + jnp.abs(model.z[...] - (1 + 1j)) ** 2


def losses(tmp_path, model, loss, sections, steps, **train):
    config = {"run": {"dir": str(tmp_path / "run")}, "train": {"steps": steps, "batch": 16, "log_every": 1, **train}, **sections}
    return [row["loss"] for row in jgt.run(config, model=model, loss=loss, data=SAMPLES).metrics if "loss" in row]


@pytest.mark.parametrize("sync", SYNCS)
def test_parameters_in_bf16_keep_their_type(sync, tmp_path):
    found = losses(tmp_path, Half, squares, SYNCS[sync], 6)
    assert len(found) == 6 and np.isfinite(found).all()


def test_complex_parameters_go_downhill(tmp_path):
    found = losses(tmp_path, Complex, distance, {"mesh": {"data": 1}, "optimizer": {"name": "adamw", "lr": 0.1, "warmup": 0}}, 30)
    assert found[0] == pytest.approx(2) and found[-1] < 0.1
