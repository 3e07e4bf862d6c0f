"""Rows that reach the devices in zigzag order (`data.order`): the batches, the losses of one device, and what is refused."""

from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

import jgt
from jgt.document import InputError
from train.config import load
from train.data.opening import open_data
from train.setup import prepare
from train.setup.feed import Feed

RULES = Path(__file__).parents[3] / "configs" / "rules"
SPLIT = (f"rules={RULES / 'context.yaml'}", "mesh={data: 2, fsdp: 1, seq: 4, tensor: 1}")
ZIGZAG = (*SPLIT, "data.order=zigzag")


def feed_of(setup):
    config = setup.run.config
    return Feed(open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused")), setup)


def losses_and_norms(run, steps=3):
    setup = prepare(run)
    state, step, found = setup.init(), setup.compile_train_step(), []
    for number, batch in enumerate(islice(feed_of(setup).train(0), steps), 1):
        state, metrics = step(state, batch, setup.settings(number))
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return np.array(found)


MODELS = {
    "rotary": (),
    "learned positions": ("model.kind=gpt",),
    "windows": ("model.layers=3", "model.window=10", "model.full_layers=[1]"),
    "documents": ("data.documents=mask",),
    "in stages": ("train.batch=16",),
}
STAGES = (
    f"rules={RULES / 'context.yaml'}",
    "mesh={data: 1, fsdp: 1, stage: 2, seq: 4, tensor: 1}",
    "pipeline={signal: layers, microbatches: 2}",
    "data.order=zigzag",
)


@pytest.mark.parametrize("name", [name if name == "documents" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_losses_are_those_of_one_device(tiny_file, name):
    layout = STAGES if name == "in stages" else ZIGZAG
    found, expected = (losses_and_norms(load(tiny_file, [*MODELS[name], *more])) for more in (layout, ()))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_batch_has_its_tokens_in_zigzag_order_with_their_positions(tiny_file):
    batches = [next(feed_of(prepare(load(tiny_file, ["data.documents=mask", *more]))).train(0)) for more in (SPLIT, ZIGZAG)]
    plain, zigzag = map(jax.device_get, batches)
    order = [*range(4), *range(28, 32), *range(4, 8), *range(24, 28), *range(8, 12), *range(20, 24), *range(12, 20)]
    np.testing.assert_array_equal(zigzag.pop("positions"), np.tile(order, (16, 1)))
    assert zigzag.keys() == plain.keys()
    for name, x in plain.items():
        np.testing.assert_array_equal(zigzag[name], x[:, order])


@pytest.mark.slow
def test_nothing_is_sent_to_arrange_rows(tiny_file):
    def sent(overrides):
        setup = prepare(load(tiny_file, [*overrides, "model.layers=5"]))
        plan = jgt.plan(setup.train_step(), *setup.step_shapes)
        return sum(one.total_bytes for one in plan.collectives if one.signal == "layers/attn")

    # A device has 8 rows of 8 positions of 4 heads of 8 elements: q, k, v and the result cross devices forward and backward.
    assert sent(SPLIT) - sent(ZIGZAG) == 5 * 2 * 4 * (4 * 8 * 8 * 4 * 8)


OWN = """
import jax
from flax import nnx

class Model(nnx.Module):
    def __init__(self, vocab, rngs):
        self.table = nnx.Embed(vocab, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.table.attend(self.table(tokens))
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.order=zigzag",), "data.order: zigzag is the order of attention over one axis of the mesh, but no rule splits a sequence"),
        ((*ZIGZAG, "train.loss=losses:mine"), "data.order: a loss of your own would see the tokens of a row in another order"),
        ((*ZIGZAG, "model.seq=36"), r"a sequence of 36 does not divide by 8 \(zigzag order: twice the axis\). Take 32 or 40"),
        ((*ZIGZAG, "model={kind: 'own:Model', vocab: 256, seq: 32}"), r"data.order: zigzag needs a model that takes positions \[b, s\]"),
    ],
)
def test_what_zigzag_rows_need(tiny_file, tmp_path, overrides, message):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(InputError, match=message):
        prepare(load(tiny_file, list(overrides), code=[str(tmp_path / "own.py")]))


EXPERTS = """
axes: {{batch: [data, fsdp, expert], shards: [fsdp, seq, expert]}}
inputs: [batch, seq, ...]
params: {{"{{embedding,unembedding}}": [shards, null]}}
signals:
  embed: {{out: [batch, seq, null]}}
  layers/attn:
    params: {{"*_proj/kernel": [shards, null], out/kernel: [null, shards]}}
    context: {{axis: seq, method: ring}}
    out: [batch, seq, null]
  layers/moe:
    params: {{"experts/*": [{axis}, null, null]}}
    experts: {{axis: {axis}}}
    out: [batch, seq, null]
default: replicate
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["expert", "seq"])
def test_experts_of_tokens_whose_sequence_is_split(tiny_file, tmp_path, axis):
    (tmp_path / "rules.yaml").write_text(EXPERTS.format(axis=axis))
    layout = (f"rules={tmp_path / 'rules.yaml'}", "mesh={data: 1, fsdp: 1, seq: 4, expert: 2}", "data.order=zigzag")
    model = ("model.experts={count: 8, ffn: 32, shared: 1}",)
    found, expected = (losses_and_norms(load(tiny_file, [*model, *more])) for more in (layout, ()))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
