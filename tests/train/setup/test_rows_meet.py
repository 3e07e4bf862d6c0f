"""Losses that compare the rows of their batch with each other: refused in parts of a batch, and evaluated in whole batches."""

import sys

import pytest

import jgt
from jgt.document import InputError
from train.config import load
from train.settings.code.files import read_code
from train.setup import prepare

CODE = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jgt import signal

def data(split, held_out: int = 20):
    random = np.random.default_rng(0)
    count = 64 if split == "train" else held_out
    return [{"a": random.standard_normal(8, np.float32), "b": random.standard_normal(8, np.float32), "y": np.float32(i % 3),
             "m": np.float32(i % 5 != 0)} for i in range(count)]

class Towers(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

def error(model, batch):
    return (model.a(batch["a"]).sum(-1) - batch["y"]) ** 2

def clip(model, batch):
    logits = 10 * unit(model.a(batch["a"])) @ unit(model.b(batch["b"])).T
    n = jnp.arange(len(logits))
    return -jax.nn.log_softmax(logits)[n, n].mean() / 2 - jax.nn.log_softmax(logits, 0)[n, n].mean() / 2

def in_batch_negatives(model, batch):
    scores = unit(model.a(batch["a"])) @ unit(model.b(batch["b"])).T
    return -jnp.mean(jnp.diag(scores) - jax.nn.logsumexp(scores, -1))

def ranking(model, batch):
    s = model.a(batch["a"]).sum(-1)
    return jnp.mean(jax.nn.softplus(s[None] - s[:, None]) * (batch["y"][:, None] > batch["y"][None]))

def hardest(model, batch):
    return jnp.max(error(model, batch))

def batch_norm(model, batch):
    return jnp.mean((model.norm(model.a(batch["a"])).sum(-1) - batch["y"]) ** 2)

def masked_mean(model, batch):
    return jnp.sum(error(model, batch) * batch["m"]) / jnp.sum(batch["m"])

def total(model, batch):
    return jnp.sum(error(model, batch))

def fixed_weight(model, batch):
    return jnp.sum(error(model, batch)), 8.0

def retrieval_metric(model, batch):
    scores = unit(model.a(batch["a"])) @ unit(model.b(batch["b"])).T
    return jnp.mean(error(model, batch)), {"top1": jnp.mean(scores.argmax(-1) == jnp.arange(len(scores)))}

def byol(model, batch):
    a, b = unit(model.a(batch["a"])), jax.lax.stop_gradient(unit(model.b(batch["b"])))
    return jnp.mean(2 - 2 * jnp.sum(a * b, -1))

def plain(model, batch):
    return jnp.mean(error(model, batch))

def weighted(model, batch):
    return (jnp.sum(error(model, batch) * batch["m"]), jnp.sum(batch["m"])), {"mae": jnp.mean(jnp.sqrt(error(model, batch)))}

def dropped(model, batch):
    return jnp.mean((model.drop(model.a(batch["a"])).sum(-1) - batch["y"]) ** 2)

def of_a_part(model, batch):
    with signal.per_microbatch():
        return jnp.mean((model.norm(model.a(batch["a"])).sum(-1) - batch["y"]) ** 2)
"""

RUN = {
    "model": {"kind": "towers:Towers"},
    "data": {"source": "towers:data"},
    "train": {"loss": "towers:plain", "steps": 1, "batch": 8},
    "mesh": {"data": 1},
}
MEETING = {
    "clip": "it pairs rows of the batch with each other",
    "in_batch_negatives": "it pairs rows of the batch with each other",
    "ranking": "it pairs rows of the batch with each other",
    "hardest": "reduce_max",
    "batch_norm": "a number that is computed from all rows is used for each of them again",
    "masked_mean": "a quotient, a product or another function of sums over rows",
    "total": "is a sum over rows, where a scalar counts as a mean",
    "fixed_weight": "is a pair of which one number grows with the rows and the other does not",
    "retrieval_metric": "the metric top1 of a batch cannot be made",
}
APART = ["byol", "plain", "weighted", "dropped", "of_a_part"]


@pytest.fixture
def code(tmp_path):
    (tmp_path / "towers.py").write_text(CODE)
    yield read_code([tmp_path / "towers.py"])
    sys.modules.pop("towers", None)


def run_of(code, loss, *overrides):
    return load(RUN, [f"train.loss=towers:{loss}", *overrides], code=code)


@pytest.mark.parametrize("loss", MEETING)
def test_a_loss_whose_rows_meet_is_refused_in_parts_with_the_line_and_the_remedies(code, loss):
    with pytest.raises(InputError) as caught:
        prepare(run_of(code, loss, "train.accumulate=4"), num_devices=1)
    (problem,) = caught.value.problems
    assert problem.startswith("command line: train.accumulate=4: train.accumulate: ")
    assert MEETING[loss] in problem
    assert "Set it to 1" in problem
    assert "return (sum, weight)" in problem
    assert "jgt.signal.per_microbatch()" in problem


@pytest.mark.parametrize("loss", ["clip", "batch_norm", "hardest"])
def test_without_parts_it_is_taken(code, loss):
    assert prepare(run_of(code, loss), num_devices=1).objective is not None


@pytest.mark.parametrize("loss", APART)
def test_a_loss_whose_rows_stay_apart_is_the_same_in_parts(code, loss, tmp_path):
    overrides = ["train.steps=2"]
    losses = []
    for accumulate in (1, 4):
        found = jgt.run(
            RUN,
            [f"train.loss=towers:{loss}", *overrides, f"train.accumulate={accumulate}", f"run.dir={tmp_path}/{accumulate}"],
            code=[tmp_path / "towers.py"],
        )
        losses.append([row["loss"] for row in found.metrics if "loss" in row])
        sys.modules.pop("towers", None)
    if loss not in ("dropped", "of_a_part"):
        # Noise and statistics of a part are others.
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "held_out", "rows"),
    [("clip", 20, 8), ("retrieval_metric", 20, 8), ("plain", 20, 5), ("byol", 30, 6), ("batch_norm", 20, 5), ("plain", 3, 3)],
)
def test_an_evaluation_gets_whole_batches_only_where_rows_meet(code, loss, held_out, rows):
    from train.run.opened import open_run
    from train.setup.feed import Feed

    # Batch norm takes its running statistics in an evaluation, so its rows do not meet there.
    setup, data = open_run(run_of(code, loss, f"data.held_out={held_out}"))
    assert Feed(data, setup).eval_batch == rows


def test_too_few_samples_for_a_whole_batch_are_an_error(code):
    from train.run.opened import open_run

    with pytest.raises(InputError, match="6 held-out samples are fewer than a batch of 8, which the loss compares with each other"):
        open_run(run_of(code, "clip", "data.held_out=6"))
