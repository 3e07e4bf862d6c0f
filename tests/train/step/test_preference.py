"""The losses of preferences are those of their papers, on every mesh and in a pipeline."""

import functools
import math
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgt.document import InputError
from train.config import load
from train.data.opening import open_own_data
from train.data.own import open_own
from train.settings.code.files import read_code
from train.setup import prepare
from train.setup.feed import Feed
from train.step.preference import orpo_loss

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


def of_trl(logits, targets, mask):
    """The loss of ORPO of a pair, and the logarithm of its odds ratio, as trl's ORPOTrainer writes them. logits: [2, s, v], others: [2, s].

    Its cross entropy is over the tokens of a whole batch; in a batch of one pair, that is the paper's.
    """
    per_token = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), targets[..., None], -1)[..., 0]
    chosen, rejected = (per_token * mask).sum(-1) / mask.sum(-1)
    log_odds = (chosen - rejected) - (jnp.log1p(-jnp.exp(chosen)) - jnp.log1p(-jnp.exp(rejected)))
    return -chosen - BETA * jnp.log(jax.nn.sigmoid(log_odds)), log_odds


def by_trl(setup, params, batch):
    """The loss of ORPO, pair after pair, from whole logits."""
    logits = [setup.program.model.apply(params, {}, pair) for pair in batch["inputs"]]
    losses, odds = zip(*map(of_trl, logits, batch["targets"], batch["weights"]), strict=True)
    return jnp.mean(jnp.array(losses)), jnp.array(odds)


@pytest.mark.parametrize(("loss", "by_hand"), [("dpo", by_hand), ("orpo", by_trl)])
def test_the_loss_and_its_gradient_are_those_of_the_paper(run_of, loss, by_hand):
    setup, params, batch, rows = trained(run_of("one device", f"train.loss={loss}"))
    loss, margins = by_hand(setup, params, batch)
    assert rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert rows[0]["margin"] == pytest.approx(float(jnp.mean(margins)), rel=1e-4, abs=1e-4)
    assert rows[0]["accuracy"] == pytest.approx(float(jnp.mean(margins > 0)))
    gradient = jax.grad(lambda params: by_hand(setup, params, batch)[0])(params)
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient)))
    assert rows[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.fixture(scope="module")
def alone(run_of):
    return functools.cache(lambda loss: trained(run_of("one device", f"train.loss={loss}"))[-1])


def in_layouts():
    """Each layout with DPO, a few of them quick, and with ORPO, whose loss differs after the log-probabilities alone."""
    for loss, quick in (("dpo", QUICK), ("orpo", ())):
        for layout in LAYOUTS:
            if layout != "one device":
                marks = () if layout in quick else pytest.mark.slow
                yield pytest.param(loss, layout, marks=marks, id=layout if loss == "dpo" else f"{loss}-{layout}")


@pytest.mark.parametrize(("loss", "layout"), [*in_layouts()])
def test_every_layout_has_the_numbers_of_one_device(run_of, alone, loss, layout):
    for row, expected in zip(trained(run_of(layout, f"train.loss={loss}"))[-1], alone(loss), strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_loss_of_orpo_is_that_of_trl():
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(3, 2, 4, 8)).astype(np.float32), random.integers(0, 8, (3, 2, 4))
    # The last pair is padding.
    weights = np.array([[[0, 1, 1, 0], [0, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 1, 1]], np.zeros((2, 4))], np.float32)
    batch = {"inputs": targets, "targets": targets, "weights": weights}

    def ours(logits):
        (total, pairs), metrics = orpo_loss(lambda inputs: logits.reshape(-1, 4, 8), batch, beta=BETA)
        return total / pairs, metrics["margin"][0] / pairs

    def theirs(logits):
        losses, odds = zip(*map(of_trl, logits[:2], targets[:2], weights[:2]), strict=True)
        return sum(losses) / 2, sum(odds) / 2

    (loss, margin), (expected, odds) = ours(logits), theirs(logits)
    assert (float(loss), float(margin)) == pytest.approx((float(expected), float(odds)), rel=1e-5)
    gradient, of_theirs = (jax.grad(lambda x, of=of: of(x)[0])(logits) for of in (ours, theirs))
    np.testing.assert_allclose(gradient, of_theirs, atol=1e-6)
    # An answer that is certain has infinite odds in trl.
    certain = 200.0 * jax.nn.one_hot(targets, 8)
    assert float(ours(certain)[0]) == pytest.approx(BETA * math.log(2), rel=1e-5)
    assert np.isfinite(jax.grad(lambda x: ours(x)[0])(certain)).all()


def test_beta_belongs_to_these_losses(run_of):
    with pytest.raises(InputError, match=r"train\.beta: only train\.loss: dpo and orpo read it"):
        run_of("one device", "train.loss=null", "data={source: stdlib}")
