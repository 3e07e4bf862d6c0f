"""The loss of preferences is the paper's, on every mesh and in a pipeline."""

import math
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jgt.document import InputError
from train.code.files import read_code
from train.config import load
from train.data.opening import open_own_data
from train.data.own import open_own
from train.run.start import Feed
from train.setup import prepare

SEQ, VOCAB, BETA = 16, 32, 0.3
ROOT = Path(__file__).parents[3]
PAIRS = f"""
import numpy as np

def pairs(split):
    random = np.random.default_rng(0 if split == "train" else 1)
    def pair():
        tokens = random.integers(0, {VOCAB}, (2, {SEQ} + 1))
        begins, ends = random.integers(1, 6), random.integers(8, {SEQ}, 2)[:, None]
        places = np.arange({SEQ})
        return {{"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.float32((places >= begins) & (places < ends)),
                 "reference": -np.float32(random.uniform(10, 40, 2))}}
    return [pair() for _ in range(32)]
"""
RUN = f"""
model: {{layers: 2, embed: 16, heads: 4, kv_heads: 2, ffn: 32, vocab: {VOCAB}, seq: {SEQ}}}
data: {{source: "preferences_of_people:pairs", shuffle: false}}
train: {{steps: 3, batch: 8, loss: dpo, beta: {BETA}}}
optimizer: {{lr: 0.003, clip: null}}
rules: %s
mesh: %s
"""
LAYOUTS = {
    "one device": ("replicated", "{data: 1}", ()),
    "fsdp": ("fsdp", "{fsdp: 8}", ()),
    "fsdp_tensor": ("fsdp_tensor", "{data: 2, fsdp: 2, tensor: 2}", ()),
    "chunks": ("replicated", "{data: 1}", ("train.loss_chunks=4",)),
    "accumulated": ("fsdp", "{fsdp: 2}", ("train.accumulate=4",)),
    "pipeline": ("pipeline", "{data: 2, fsdp: 1, stage: 2, tensor: 2}", ("pipeline={signal: layers, microbatches: 2}",)),
    "zb": ("pipeline", "{data: 2, fsdp: 1, stage: 2, tensor: 1}", ("pipeline={signal: layers, microbatches: 4, schedule: zb}",)),
}
QUICK = ("one device", "fsdp_tensor", "pipeline")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    (code := folder / "preferences_of_people.py").write_text(PAIRS)

    def _run(layout="one device", *overrides):
        rules, mesh, more = LAYOUTS[layout]
        text = RUN % (ROOT / "configs" / "rules" / f"{rules}.yaml", mesh)
        file = folder / "run.yaml"
        file.write_text(text)
        return load(file, [*more, *overrides], code=read_code([code]), num_processes=1)

    return _run


def trained(run):
    """The metrics of the first steps, and the parameters after the first."""
    setup = prepare(run, devices=jax.devices()[: math.prod(run.mesh.values())])
    config = run.config
    source = open_own(config.data, run.code, run.where, seq=SEQ, vocab=VOCAB)
    feed = Feed(open_own_data(source, config.data, seed=0), setup)
    state, step, rows = setup.init(), setup.compile_train_step(), []
    first = jax.device_get(setup.model_params(setup.eval_params(state)))
    batches = list(islice(feed.train(0), 3))
    for number, batch in enumerate(batches, 1):
        state, metrics = step(state, batch, setup.settings(number))
        rows.append({name: float(x) for name, x in metrics.items()})
    return setup, first, jax.device_get(batches[0]), rows


def by_hand(setup, params, batch):
    """The paper's loss, pair after pair, from whole logits."""
    model, losses, margins = setup.program.model, [], []
    for n in range(len(batch["inputs"])):
        rewards = []
        for answer in range(2):
            logits = model.apply(params, {}, batch["inputs"][n, answer][None])[0]
            chosen = jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(SEQ), batch["targets"][n, answer]]
            rewards.append(BETA * (jnp.sum(chosen * batch["weights"][n, answer]) - batch["reference"][n, answer]))
        margins.append(rewards[0] - rewards[1])
        losses.append(-jnp.log(1 / (1 + jnp.exp(-margins[-1]))))
    return jnp.mean(jnp.array(losses)), jnp.array(margins)


def test_the_loss_and_its_gradient_are_those_of_the_paper(run_of):
    setup, params, batch, rows = trained(run_of())
    loss, margins = by_hand(setup, params, batch)
    assert rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert rows[0]["margin"] == pytest.approx(float(jnp.mean(margins)), rel=1e-4, abs=1e-4)
    assert rows[0]["accuracy"] == pytest.approx(float(jnp.mean(margins > 0)))
    gradient = jax.grad(lambda params: by_hand(setup, params, batch)[0])(params)
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient)))
    assert rows[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.fixture(scope="module")
def alone(run_of):
    return trained(run_of())[-1]


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS if n != "one device"])
def test_every_layout_has_the_numbers_of_one_device(run_of, alone, layout):
    for row, expected in zip(trained(run_of(layout))[-1], alone, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_beta_belongs_to_this_loss(run_of):
    with pytest.raises(InputError, match=r"train\.beta: only train\.loss: dpo reads it"):
        run_of("one device", "train.loss=null", "data={source: stdlib}")
