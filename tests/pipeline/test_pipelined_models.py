"""A pipeline trains all kinds of layers, and models by any author, as one device does."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    EMBED,
    FFN,
    LAYERS,
    ROWS,
    RULES,
    SEQ,
    assert_close,
    assert_exact,
    assert_trained,
    assert_values,
    case,
    compiled,
    decoder_loss,
    embed,
    loss_of,
    make_batch,
    make_params,
    mesh_of,
    mlp,
    pipeline_of,
    run_layers,
)
from next_checkpoint import next_checkpoint
from small_transformers import EMBED as WIDTH
from small_transformers import RULES as TRANSFORMER_RULES
from small_transformers import SEQ as LENGTH
from small_transformers import VOCAB as WORDS
from small_transformers import Block, cross_entropy

import jgt
from jgt.signal import context, tensor
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.kernels import XLA
from train.setup.remat import with_remat_of
from train.step.loss import make_loss

SIZES = {"stage": 2, "tensor": 2, "data": 2}
ROOT = Path(__file__).parents[2]


# -- what layers are made of --------------------------------------------------------------------------------------


def moving(params, batch):
    """Entries move along a dim that is sharded over tensor, along seq, and in a scan over seq."""

    def layer(x, weights):
        with context("mlp"):
            hidden = tensor(jnp.tanh(x @ weights["up"]), "hidden")
            hidden = jnp.roll(hidden, 3, axis=-1) + jnp.concatenate([hidden[..., 5:], hidden[..., :5]], axis=-1) * 0.5
            x = x + hidden @ weights["down"]
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = x + 0.5 * before

        def step(state, entry):
            state = jnp.tanh(0.5 * state + entry)
            return state, state

        _, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))
        return x + jnp.moveaxis(states, 0, 1)

    return loss_of(params, run_layers(params, embed(params, batch), layer), batch)


@jax.custom_vjp
def squashed(x):
    """tanh with a custom derivative, which is computed from the result."""
    return jnp.tanh(x)


squashed.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, g: (g * (1 - y**2),))


def branching(params, batch):
    """Each layer branches on a flag, has a custom derivative, and is recomputed except for the values that a policy keeps."""
    flags = jnp.arange(len(params["layers"]["up"])) % 3 == 0

    def layer(x, scanned):
        weights, flag = scanned
        with context("mlp"):
            hidden = tensor(squashed(x @ weights["up"]), "hidden")
            hidden = jax.lax.cond(flag, lambda h: h * jnp.mean(h, axis=-1, keepdims=True), jnp.sin, hidden)
            return x + hidden @ weights["down"], None

    layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False)
    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(layer, x, (params["layers"], flags))
    return loss_of(params, x, batch)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (moving, {}),
        (moving, {"schedule": "zb", "remat": "stage"}),
        (branching, {}),
        (branching, {"schedule": "zigzag", "remat": "layer"}),
        (branching, {"schedule": "zb_interleaved", "remat": "stage"}),
    ],
    ids=["moving", "moving recomputed", "branching", "branching by layer", "branching by stage"],
)
def test_layers_are_made_of_anything(loss, options):
    assert_trained(case(loss, make_params(5)), mesh_of(**SIZES), **options)


# -- how layers are scanned ---------------------------------------------------------------------------------------


def in_reverse(params, batch, key):
    """The last layer first, with keys and numbers of layers among what it scans, and results of each layer."""
    scanned = (params["layers"], jax.random.split(key, len(params["layers"]["up"])), jnp.arange(len(params["layers"]["up"])))

    def layer(carry, scanned):
        (x, count), (weights, _, number) = carry, scanned
        return (mlp(x, weights), count + 1), (jnp.mean(x * number), count, number)

    x = embed(params, batch)
    with context("layers"):
        (x, _), (means, counts, numbers) = jax.lax.scan(layer, (x, 0), scanned, reverse=True)
    return loss_of(params, x, batch) + jnp.sum(means * (1 + numbers)), (means, counts, numbers)


@pytest.mark.parametrize(
    ("num_layers", "options"),
    [(4, {"schedule": "1f1b"}), (5, {"schedule": "zb", "remat": "stage"}), (4, {"schedule": "interleaved", "gather": "layer"})],
    ids=str,
)
def test_layers_in_reverse(num_layers, options):
    reversed_ = case(in_reverse, make_params(num_layers), make_batch(), jax.random.key(0), has_aux=True)
    assert_exact(reversed_, mesh_of(**SIZES), **options)


def around_others(params, batch):
    """Layers between shorter stacks under the same signal."""
    x = run_layers({"layers": params["first"]}, embed(params, batch))
    x = run_layers(params, x)
    return loss_of(params, run_layers({"layers": params["last"]}, x), batch)


@pytest.mark.slow
def test_shorter_stacks_run_with_the_embedding_and_the_head():
    stack = make_params(2)["layers"]
    params = make_params() | {"first": stack, "last": jax.tree.map(lambda x: x[:1], stack)}
    assert_trained(case(around_others, params), mesh_of(**SIZES), schedule="zb")


def layers_twice(params, batch):
    stack = jax.tree.map(lambda a: jnp.concatenate([a, a]), params["layers"])
    return loss_of(params, run_layers(params | {"layers": stack}, embed(params, batch)), batch)


def test_layers_that_run_twice_are_a_stack_repeated():
    def applied_twice(params, batch):
        return loss_of(params, run_layers(params, run_layers(params, embed(params, batch))), batch)

    repeated = case(layers_twice)
    assert_values(repeated.expected[0], case(applied_twice).expected[0])
    assert_exact(repeated, mesh_of(**SIZES), schedule="interleaved")


def test_weight_gradients_wait_behind_a_barrier_of_their_own():
    """The cotangent of an activation does not depend on the gradient of the weights, though both pass the barrier of the layer."""

    def layer(x, weights):
        return mlp(*jax.lax.optimization_barrier((x, weights)))

    def loss(params, batch):
        return loss_of(params, run_layers(params, embed(params, batch), layer), batch)

    assert_trained(case(loss), mesh_of(**SIZES), schedule="zb")


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_layers_under_jaxs_next_checkpoint(remat):
    with next_checkpoint():
        assert_trained(case(branching, make_params(5)), mesh_of(**SIZES), remat=remat)


# -- what is saved ------------------------------------------------------------------------------------------------


def with_save(hidden):
    """The decoder's rules, with a save action for the tensor `hidden` of its layers."""
    signals = RULES["signals"]
    return RULES | {"signals": signals | {"layers/mlp": signals["layers/mlp"] | {"save": {"hidden": hidden}}}}


def saves_hidden(measured, **options):
    """Whether the program has a buffer for the tensor `hidden`: [..., rows of a microbatch on a shard, s, f]."""
    pipelined = measured.pipelined(mesh_of(**SIZES), **options)
    text = str(jax.make_jaxpr(jax.value_and_grad(pipelined))(measured.params, *measured.inputs))
    return re.search(rf"f32\[(\d+,){{2,}}{ROWS // 8},{SEQ},{FFN}\]", text) is not None


@pytest.mark.parametrize(("remat", "action"), [("none", "keep"), ("none", "recompute"), ("layer", "keep")])
def test_named_values_are_saved_as_the_rules_say(remat, action):
    assert_trained(case(rules=with_save(action)), mesh_of(**SIZES), remat=remat)


def test_what_is_not_kept_is_computed_again():
    assert saves_hidden(case(rules=with_save("keep")))
    assert not saves_hidden(case(rules=with_save("recompute")))


# -- who wrote the model ------------------------------------------------------------------------------------------


class Linen(nn.Module):
    """A model as its author would write it, with layers that are scanned and recomputed."""

    layers: int

    @nn.compact
    def __call__(self, tokens):
        with context("embed"):
            h = nn.Embed(WORDS, WIDTH, name="embed")(tokens)
        with context("layers"):
            block = nn.remat(Block, prevent_cse=False)
            layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            h, _ = layers(name="layers")(h, None)
        with context("head"):
            return nn.Dense(WORDS, use_bias=False, name="unembed")(h)


def test_linen_scanned_and_recomputed():
    model = Linen(LAYERS)
    tokens = np.random.default_rng(0).integers(0, WORDS, (16, LENGTH), np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    loss = lambda params, tokens: cross_entropy(model.apply(params, tokens), tokens)  # noqa: E731
    assert_trained(case(loss, params, tokens, rules=TRANSFORMER_RULES), mesh_of(**SIZES), schedule="interleaved")


@pytest.mark.parametrize(
    ("kind", "chunks", "remat", "schedule"),
    [
        pytest.param("llama", 2, "none", "1f1b", marks=pytest.mark.slow),
        pytest.param("llama", 1, "matmuls", "interleaved", marks=pytest.mark.slow),
        pytest.param("llama", 1, "none", "zb", marks=pytest.mark.slow),
        pytest.param("llama", 1, "matmuls", "zb", marks=pytest.mark.slow),
        pytest.param("gpt", 1, "none", "1f1b", marks=pytest.mark.slow),
        pytest.param("gpt", 1, "matmuls", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_models_and_rules_that_ship(kind, chunks, remat, schedule):
    model = build(ModelConfig(kind=kind, layers=LAYERS, embed=16, heads=2, ffn=32, vocab=32, seq=8))
    params, variables = model.init(jax.random.key(0))
    of_module = make_loss(lambda module, tokens: module.features(tokens), chunks=chunks)
    loss = lambda params, batch: model.run(lambda module: of_module(module, batch), params, variables, True)[0]  # noqa: E731
    loss = with_remat_of(loss, remat, XLA, "run.yaml:1")
    batch = {name: np.random.default_rng(0).integers(0, 32, (16, 8), np.int32) for name in ("inputs", "targets")}
    batch |= {"weights": np.random.default_rng(1).uniform(0, 1 / 128, (16, 8)).astype(np.float32)}
    rules = jgt.load_rules(ROOT / "configs" / "rules" / "pipeline.yaml")
    found, wanted = (
        jax.device_get(compiled(jax.value_and_grad(fn))(params, batch))
        for fn in (jgt.shard(loss, rules, mesh_of(**SIZES), pipeline=pipeline_of(schedule=schedule)), loss)
    )
    assert_values(found[0], wanted[0])
    assert_close(found[1], wanted[1], 1e-5)


# -- where parameters go ------------------------------------------------------------------------------------------


def places_of(num_layers, rules=RULES, loss=decoder_loss, **options):
    """The spec of every parameter on 2 stages."""
    shapes = jax.eval_shape(lambda: (make_params(num_layers), make_batch()))
    placement = jgt.place(
        loss, jgt.make_rules(rules), jgt.abstract_mesh({"fsdp": 2, "data": 1} | SIZES), *shapes, pipeline=pipeline_of(**options)
    )
    return {p.path: p.spec for p in placement.parameters}


def test_layers_are_stored_by_stage_where_each_stage_runs_as_many_neighbours():
    ends = {"embed": "[[stage, tensor, fsdp], null]", "unembed": "[[stage, tensor], fsdp]"}
    by_stage = {"layers/up": "[stage, fsdp, tensor]", "layers/down": "[stage, tensor, fsdp]"}
    assert places_of(4) == by_stage | ends
    # Elsewhere another dim is split, so that no stage stores the layers of all.
    by_columns = {"layers/up": "[null, [fsdp, stage], tensor]", "layers/down": "[null, tensor, [fsdp, stage]]"}
    assert places_of(6, schedule="zigzag", virtual=None) == by_columns | ends
    assert places_of(6, schedule="interleaved", virtual=3) == by_columns | ends
    assert places_of(5) == by_columns | ends

    def behind_a_barrier(params, batch):
        return decoder_loss(*jax.lax.optimization_barrier((params, batch)))

    assert places_of(4, loss=behind_a_barrier) == by_stage | ends
    assert places_of(4, loss=lambda params, batch: in_reverse(params, batch, jax.random.key(0))[0]) == by_stage | ends


def test_initial_parameters_are_the_same_on_every_mesh():
    def init(key):
        """Parameters of the decoder."""
        shapes = jax.eval_shape(make_params)
        keys = iter(jax.random.split(key, 4))
        return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), shapes)

    rules, batch = jgt.make_rules(RULES), make_batch()
    plain = jgt.init(init, rules, mesh_of(data=4, tensor=2), jax.random.key(0), loss=decoder_loss, batch=batch)
    mesh = mesh_of(**SIZES)
    sharded = jgt.shard(decoder_loss, rules, mesh, pipeline=pipeline_of())
    staged = jgt.init(init, rules, mesh, jax.random.key(0), loss=sharded, batch=batch, pipeline=pipeline_of())
    jax.tree.map(np.testing.assert_array_equal, staged, plain)
    assert {x.sharding.spec[0] for x in staged["layers"].values()} == {"stage"}
    assert [x.addressable_shards[0].data.shape for x in (staged["layers"]["up"], staged["embed"])] == [(2, EMBED, FFN // 2), (4, EMBED)]
    # Where they were born they train, without jax.jit around.
    value, gradients = jax.value_and_grad(sharded)(staged, batch)
    expected, expected_gradients = jax.value_and_grad(decoder_loss)(jax.device_get(plain), batch)
    assert_values(value, expected)
    assert_close(gradients, expected_gradients, 1e-5)


BOTH_AXES = RULES | {
    "signals": RULES["signals"]
    | {
        "layers/mlp": {
            "params": {"up": [None, ["tensor", "fsdp"]], "down": [["fsdp", "tensor"], None]},
            "tensors": {"hidden": ["batch", None, "tensor"]},
        }
    }
}


@pytest.mark.parametrize("gather", ["step", "layer"])
def test_a_dim_that_is_split_over_tensor_and_fsdp(gather):
    assert_exact(case(rules=BOTH_AXES), mesh_of(stage=2, fsdp=2, tensor=2), gather=gather)


def test_layers_may_call_a_function_that_is_jitted():
    """Examples are the activations of JAX (jax.nn.silu), and modules that their author jitted."""
    layer = jax.jit(mlp)

    def loss(params, batch):
        return loss_of(params, run_layers(params, embed(params, batch), lambda x, weights: layer(jax.nn.silu(x), weights)), batch)

    assert_trained(case(loss), mesh_of(**SIZES))
