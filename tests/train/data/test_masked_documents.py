"""Documents of one window that are masked from each other train as if each of them were alone. b batch, s seq."""

import json
import sys
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path

import jax
import numpy as np
import pytest

import jgt
from jgt.document import InputError
from jgt.pipeline.staging import Pipeline
from train.config import load
from train.data.batches import masked
from train.data.opening import open_data
from train.generate.generate import sample_text
from train.models.config import ModelConfig
from train.models.decoder import build
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare
from train.setup.feed import Feed
from train.step.loss import make_loss

RULES = Path(__file__).parents[3] / "configs" / "rules"
ROWS, SEQ, VOCAB, END = 8, 16, 32, 0
NAMES = ("inputs", "targets", "weights")


def make_batch():
    """Windows with documents of 1 to 16 tokens; one row is a single document, and one is all ends."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCAB, (ROWS, SEQ + 1), np.int32)
    tokens[random.random(tokens.shape) < 0.2] = END
    tokens[0, :], tokens[1, :] = np.where(tokens[0] == END, 1, tokens[0]), END
    weights = random.uniform(0.5, 1.5, (ROWS, SEQ)).astype(np.float32) / (ROWS * SEQ)
    return masked({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}, END)


def each_alone(batch):
    """Every document of a batch as a row of its own, padded behind."""
    documents = []
    for row in range(ROWS):
        ends = np.flatnonzero(batch["inputs"][row] == END) + 1
        for start, stop in zip([0, *ends], [*ends, SEQ], strict=True):
            documents.append({name: np.pad(batch[name][row, start:stop], (0, SEQ - (stop - start))) for name in NAMES})
    return {name: np.stack([document[name] for document in documents]) for name in NAMES}


def make(kind, chunks=1):
    """A model with parameters that are not its initial ones, and its loss."""
    model = build(
        ModelConfig(kind=kind, layers=4, embed=16, heads=4, kv_heads=2 if kind == "llama" else None, ffn=32, vocab=VOCAB, seq=SEQ)
    )
    params, variables = model.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(tree, [x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)])
    of_module = make_loss(lambda module, x, **more: module.features(x, **more), chunks=chunks)
    return params, lambda params, batch: model.run(lambda module: of_module(module, batch), params, variables, True)[0]


def value_and_gradients(loss, params, batch):
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch))


@cache
def of_each_alone(kind):
    """The reference: the loss and its gradients, of every document without the others."""
    params, loss = make(kind)
    return value_and_gradients(loss, params, each_alone(make_batch()))


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    jax.tree.map(assert_close, found[1], wanted[1])


def assert_close(found, wanted):
    # The largest entries decide the rounding errors of f32. A bias of keys has no other gradient: adding to all keys changes no softmax.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 + 5e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_the_loss_and_its_gradients_are_those_of_each_document_alone(kind):
    (params, loss), batch, wanted = make(kind), make_batch(), of_each_alone(kind)
    assert_same(value_and_gradients(loss, params, batch), wanted)
    # Without the segments the documents see each other.
    joined = jax.jit(loss)(params, {name: batch[name] for name in NAMES})
    assert abs(joined - wanted[0]) > 1e-3 * abs(wanted[0])


LAYOUTS = {
    "fsdp_tensor": ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2}, None),
    "sequence": ("sequence", {"data": 4, "tensor": 2}, None),
    "1f1b": ("pipeline", {"data": 2, "fsdp": 1, "stage": 2, "tensor": 2}, {"schedule": "1f1b"}),
    "interleaved": ("pipeline", {"data": 2, "fsdp": 1, "stage": 2, "tensor": 2}, {"schedule": "interleaved", "virtual": 2}),
    "zb": ("pipeline", {"data": 1, "fsdp": 2, "stage": 4, "tensor": 1}, {"schedule": "zb"}),
}
ALWAYS = [("llama", "sequence"), ("gpt", "fsdp_tensor"), ("gpt", "1f1b")]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*of, marks=[pytest.mark.slow] * (of not in ALWAYS)) for of in product(("llama", "gpt"), LAYOUTS)],
)
def test_every_layout_has_the_same_numbers(kind, layout):
    rules, mesh, pipeline = LAYOUTS[layout]
    (params, loss), batch = make(kind), make_batch()
    options = {} if pipeline is None else {"pipeline": Pipeline(signal="layers", microbatches=4, **pipeline)}
    sharded = jgt.shard(loss, jgt.load_rules(RULES / f"{rules}.yaml"), jgt.make_mesh(mesh), **options)
    assert_same(value_and_gradients(sharded, params, batch), of_each_alone(kind))


# -- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """Overrides of a run on lines of different lengths."""
    path = tmp_path_factory.mktemp("lines") / "squares.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} {i * i} "[: i % 13]}) + "\n" for i in range(2000)))
    return "data.source=jsonl", f"data.path={path}", "data.eval_tokens=500", "data.documents=mask"


SMALL = ("model.layers=1", "model.embed=16", "model.heads=2", "model.kv_heads=2", "model.ffn=16")


def first_steps(run, number=3):
    """Losses and norms of a run's first steps, and the loss of a batch of its evaluation."""
    setup, config = prepare(run), run.config
    data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=config.run.path / "data")
    feed, state, step, found = Feed(data, setup), setup.init(), setup.compile_train_step(), []
    for count, batch in enumerate(islice(feed.train(0), number), 1):
        state, metrics = step(state, batch, setup.settings(count))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    total, weight = setup.compile_eval_step(16)(state.params, state.variables, next(feed.evaluation(None)))["loss"]
    return np.array([*found, total / weight])


def test_a_run_has_the_numbers_of_one_device_also_in_parts(tiny, masks, rules_dir):
    one = first_steps(tiny(*masks, *SMALL))
    layout = f"rules={rules_dir / 'fsdp_tensor.yaml'}", "mesh={data: 2, fsdp: 2, tensor: 2}"
    spread = first_steps(tiny(*masks, *SMALL, *layout, "train.accumulate=2"))
    np.testing.assert_allclose(spread, one, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(tiny, masks, tmp_path, read_rows, stopped_at):
    def losses(folder):
        return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]

    options = (*masks, *SMALL, "train.steps=6", "checkpoint.every=2")
    train(tiny(*options, f"run.dir={tmp_path / 'whole'}"))
    with stopped_at(5):
        train(tiny(*options))
    train(tiny(*options))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_generated_text_ends_with_its_document(tiny, masks):
    run = tiny(*masks, "sample={tokens: 9, prompt: '1 4 9 ', temperature: 0}")
    setup = prepare(run)
    data = open_data(run.config.data, seq=32, vocab=256, seed=0, cache_dir=run.config.run.path / "data")
    state = setup.init()
    text = sample_text(setup, state, replace(data, end=None))
    assert len(text) == 15
    assert sample_text(setup, state, data) == text
    # As if the third token that is written ended documents, unless an earlier one is the same.
    end = text.encode()[8]
    assert sample_text(setup, state, replace(data, end=end)) == text[: text.encode().index(end, 6)]


# -- models and losses of the user's own ---------------------------------------------------------------------------

OWN = '''
import flax.linen as nn, jax, jax.numpy as jnp

class Means(nn.Module):
    """Scores the next token by the mean of its document so far."""
    vocab: int
    @nn.compact
    def __call__(self, tokens, segments=None):
        x = nn.Embed(self.vocab, 8)(tokens)
        before = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
        if segments is not None:
            before = before & (segments[:, :, None] == segments[:, None, :])
        return nn.Dense(self.vocab)(jnp.einsum("bst,btd->bsd", before / jnp.sum(before, -1, keepdims=True), x))

class Plain(nn.Module):
    vocab: int
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(self.vocab)(nn.Embed(self.vocab, 8)(tokens))

def loss(model, batch):
    logits = model(batch["inputs"], batch["segments"]) if isinstance(model, Means) else model(batch["inputs"])
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(batch["weights"] * nats), jnp.sum(batch["weights"])
'''


@pytest.fixture
def own(tmp_path, masks):
    (tmp_path / "own_means.py").write_text(OWN)

    def _own(kind, *overrides):
        config = {"run": {"dir": str(tmp_path / "run")}, "model": {"kind": f"own_means:{kind}", "seq": 32}, "train": {"batch": 16}}
        return load(config, [*masks, *overrides], code=read_code([tmp_path]))

    yield _own
    sys.modules.pop("own_means", None)


def test_a_model_of_ones_own_gets_the_segments(own):
    np.testing.assert_allclose(first_steps(own("Means")), first_steps(own("Means", "train.loss=own_means:loss")), rtol=0, atol=1e-5)


def test_a_model_without_segments_is_refused_unless_the_loss_is_ones_own_too(own):
    with pytest.raises(InputError, match=r"data\.documents: mask needs a model that takes segments \[b, s\], and own_means:Plain does not"):
        prepare(own("Plain"))
    prepare(own("Plain", "train.loss=own_means:loss"))
