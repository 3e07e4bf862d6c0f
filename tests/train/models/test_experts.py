"""Experts compared with every expert on every token, the choice and the losses with loops in numpy. b batch, s seq, E experts."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgt import signal
from jgt.document import InputError
from train.config import load
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.experts.balance import Routed, routed, settled, terms
from train.models.experts.config import ExpertsConfig, GroupsConfig
from train.models.experts.moe import MoE, _by_row
from train.models.experts.routing import route

CONFIGS = {
    "softmax": ExpertsConfig(count=6, choose=2),
    "sigmoid": ExpertsConfig(count=6, choose=3, score="sigmoid", balance="none"),
    "one": ExpertsConfig(count=4, choose=1, balance="batch"),
    "all": ExpertsConfig(count=3, choose=3, balance="none"),
    "groups": ExpertsConfig(count=12, choose=4, score="sigmoid", groups=GroupsConfig(count=4, choose=2)),
    "softmax groups": ExpertsConfig(count=8, choose=3, groups=GroupsConfig(count=4, choose=2), balance="none"),
    "shared": ExpertsConfig(count=4, choose=2, shared=2, ffn=5),
}
EMBED, SHAPE = 8, (3, 7)
CLAMPED = {"biases": ("experts", "router"), "swiglu_alpha": 1.7, "swiglu_limit": 0.6, "swiglu_offset": 1.0}


# -- the reference -----------------------------------------------------------------------------------------------


def slow_route(logits, bias, config):
    """The experts of one token, in the order of their scores, and their scales."""
    exponentials = np.exp(logits - logits.max())
    scores = exponentials / exponentials.sum() if config.score == "softmax" else 1 / (1 + np.exp(-logits))
    ranked = scores + bias
    allowed = range(config.count)
    if config.groups is not None:
        size, best = config.count // config.groups.count, config.choose // config.groups.choose
        members = [range(g * size, (g + 1) * size) for g in range(config.groups.count)]
        worth = [sum(sorted((ranked[e] for e in group), reverse=True)[:best]) for group in members]
        chosen = sorted(range(len(members)), key=lambda g: -worth[g])[: config.groups.choose]
        allowed = [e for g in chosen for e in members[g]]
    experts = sorted(allowed, key=lambda e: -ranked[e])[: config.choose]
    scales = scores[experts]
    return experts, scales / scales.sum() if config.choose > 1 else scales


def tokens_and_logits(config, spread=2.0):
    rng = np.random.default_rng(0)
    return rng.normal(size=(*SHAPE, EMBED)).astype(np.float32), spread * rng.normal(size=(*SHAPE, config.count)).astype(np.float32)


def every_expert(config, params, x, bias):
    """The layer, with each expert computed for each token."""
    logits = x @ params["router"]["kernel"] + params["router"].get("bias", jnp.zeros(config.count))[None, None]
    choice, scale = route(logits, bias, config)
    gates = jnp.sum(jax.nn.one_hot(choice, config.count) * scale[..., None], axis=-2)  # [b, s, E]
    p, biases = params["experts"], params.get("expert_biases")
    gate, up = (jnp.einsum("bsd,edf->bsef", x, p[name]) for name in ("gate", "up"))
    if biases is None:
        hidden = jax.nn.silu(gate) * up
    else:
        gate, up = jnp.minimum(gate + biases["gate"][None, None], 0.6), jnp.clip(up + biases["up"][None, None], -0.6, 0.6)
        hidden = gate / (1 + jnp.exp(-1.7 * gate)) * (up + 1)
    y = jnp.einsum("bsef,efd,bse->bsd", hidden, p["down"], gates)
    y += 0.0 if biases is None else jnp.einsum("ed,bse->bsd", biases["down"], gates)
    if config.shared:
        p = params["shared"]
        y += (jax.nn.silu(x @ p["gate_proj"]["kernel"]) * (x @ p["up_proj"]["kernel"])) @ p["down"]["kernel"]
    return y


# -- the layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_gets_the_experts_and_scales_of_the_reference(name):
    config = CONFIGS[name]
    _, logits = tokens_and_logits(config)
    bias = np.random.default_rng(1).normal(size=config.count).astype(np.float32)
    for added in (None, bias):
        choice, scale = route(jnp.asarray(logits), None if added is None else jnp.asarray(added), config)
        for place in np.ndindex(*SHAPE):
            experts, scales = slow_route(logits[place].astype(np.float64), 0.0 if added is None else added, config)
            assert choice[place].tolist() == experts
            np.testing.assert_allclose(scale[place], scales, rtol=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, "clamped"])
def test_values_and_gradients_are_those_of_every_expert_on_every_token(name):
    config, options = (CONFIGS["softmax"], CLAMPED) if name == "clamped" else (CONFIGS[name], {})
    x, _ = tokens_and_logits(config)
    layer = MoE(ModelConfig(layers=1, embed=EMBED, heads=2, ffn=12, experts=config, **options), rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    if options:
        # Biases begin at zero.
        rng = np.random.default_rng(4)
        params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    bias = None
    if config.balance == "bias":
        bias = jnp.asarray(np.random.default_rng(2).normal(size=config.count), jnp.float32)
        rest["bias"].set_value(bias)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)

    def ours(params, x):
        with signal.context("moe"):
            return jnp.sum(weights * nnx.merge(graph, params, rest)(x)[0])

    def slow(params, x):
        return jnp.sum(weights * every_expert(config, nnx.to_pure_dict(params), x, bias))

    found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(params, jnp.asarray(x))
    expected = jax.jit(jax.value_and_grad(slow, argnums=(0, 1)))(params, jnp.asarray(x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(np.abs(b).max(), 1e-3 if b.ndim else 1.0))


def test_rows_of_no_expert_reach_no_gradient_of_a_bias():
    rng, sizes = np.random.default_rng(0), jnp.array([3, 0, 2])
    bias = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    rows, pull = jax.vjp(lambda bias: _by_row(bias, sizes, 8), bias)
    np.testing.assert_array_equal(rows, [*[bias[0]] * 3, *[bias[2]] * 2, *np.zeros((3, 4))])
    cotangent = rng.normal(size=(8, 4)).astype(np.float32)
    wanted = [cotangent[:3].sum(0), np.zeros(4), cotangent[3:5].sum(0)]
    # A kernel leaves there what was in memory.
    cotangent[5:] = np.nan
    np.testing.assert_allclose(pull(jnp.asarray(cotangent))[0], wanted, rtol=1e-6)


def test_experts_start_different_and_scaled_by_their_inputs():
    config = ModelConfig(layers=2, embed=64, heads=2, ffn=48, experts=ExpertsConfig(count=4))
    experts = build(config).init(jax.random.key(0))[0]["layers"]["moe"]["experts"]
    assert {name: x.shape for name, x in experts.items()} == {"gate": (2, 4, 64, 48), "up": (2, 4, 64, 48), "down": (2, 4, 48, 64)}
    assert np.std(experts["up"]) == pytest.approx(64**-0.5, rel=0.05)
    assert np.std(experts["down"]) == pytest.approx((48 * 2 * config.layers) ** -0.5, rel=0.05)
    matrices = [experts[name][layer, e] for name in ("gate", "up") for layer in range(2) for e in range(4)]
    assert not any(np.allclose(a, b) for a, b in itertools.combinations(matrices, 2))


def test_the_first_layers_may_be_dense():
    config = ModelConfig(layers=3, embed=8, heads=2, ffn=12, vocab=20, seq=6, experts=ExpertsConfig(count=4, ffn=4, first_dense=2))
    params = build(config).init(jax.random.key(0))[0]
    assert params["dense"]["mlp"]["up_proj"]["kernel"].shape == (2, 8, 12)
    assert params["layers"]["moe"]["experts"]["up"].shape == (1, 4, 8, 4)
    assert "mlp" not in params["layers"]


# -- balance -----------------------------------------------------------------------------------------------------


def test_the_bias_moves_by_the_sign_of_what_an_expert_lacks():
    config = ExpertsConfig(count=4, choose=2, balance_rate=0.25)
    load, bias = jnp.asarray([[4, 0, 2, 2], [8, 0, 0, 0]]), jnp.asarray([[0.0, 1.0, 2.0, 3.0], [0.0] * 4])
    after, metrics = settled({"layers": {"moe": {"load": load, "bias": bias}, "other": 1}}, config)
    assert after["layers"]["other"] == 1
    np.testing.assert_array_equal(after["layers"]["moe"]["bias"], [[-0.25, 1.25, 2.0, 3.0], [-0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_array_equal(after["layers"]["moe"]["load"], np.zeros((2, 4)))
    np.testing.assert_allclose(metrics["expert_load"], [[2, 0, 1, 1], [4, 0, 0, 0]])
    assert metrics["load_max"] == pytest.approx((2 + 4) / 2)
    first = -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25)) / np.log(4)
    assert metrics["load_entropy"] == pytest.approx(first / 2, rel=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance", ["sequence", "batch"])
def test_the_losses_are_those_of_the_formulas(balance, score):
    config = ExpertsConfig(count=5, choose=2, score=score, balance=balance, balance_rate=0.5, z_loss=0.25)
    (b, s), layers = SHAPE, 2
    found, expected, squares = [], [], []
    for seed in range(layers):
        logits = 2 * np.random.default_rng(seed).normal(size=(*SHAPE, 5)).astype(np.float32)
        choice, _ = route(jnp.asarray(logits), None, config)
        found.append(routed(jnp.asarray(logits), choice, config))
        scores = 1 / (1 + np.exp(-logits)) if score == "sigmoid" else np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        shares = scores / scores.sum(-1, keepdims=True)
        chosen = np.array([[[e in choice[i, t].tolist() for e in range(5)] for t in range(s)] for i in range(b)])
        rows = [(chosen[i], shares[i]) for i in range(b)] if balance == "sequence" else [(chosen.reshape(-1, 5), shares.reshape(-1, 5))]
        # E / k · Σ over experts of the share of tokens that chose it and of its mean score.
        expected.append(np.mean([5 / 2 * np.sum(c.mean(0) * p.mean(0)) for c, p in rows]))
        squares.append(np.mean(np.log(np.exp(logits).sum(-1)) ** 2))
    result = terms(jax.tree.map(lambda *x: jnp.stack(x), *found), s, config)
    # The loss has the sum over layers.
    assert result["balance_loss"] == (pytest.approx(np.mean(expected), rel=1e-5), 0.5 * layers)
    assert result["z_loss"] == (pytest.approx(np.mean(squares), rel=1e-5), 0.25 * layers)


def test_equal_loads_have_a_balance_loss_of_one():
    counts, shares = jnp.full((1, 2, 4), 3, jnp.int32), jnp.full((1, 2, 4), 6 / 4)
    for balance in ("sequence", "batch"):
        found = terms(Routed(counts, shares, None), 6, ExpertsConfig(count=4, choose=2, balance=balance))
        assert found["balance_loss"][0] == pytest.approx(1.0)


# -- the section -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{experts: {count: 4, choose: 5}}", "choose: 5 of count 4 experts cannot be chosen. Use 4 at most"),
        ("{experts: {groups: {count: 3, choose: 1}}}", "groups: count 8 is not divisible by 3 groups. These divide it: 1, 2, 4, 8"),
        ("{experts: {groups: {count: 2, choose: 3}}}", "groups: 3 of 2 groups cannot be chosen. Use 2 at most"),
        (
            "{experts: {choose: 5, groups: {count: 4, choose: 2}}}",
            "groups: 2 groups have 4 experts, but choose is 5. Choose 3 groups or more",
        ),
        (
            "{layers: 2, experts: {first_dense: 2}}",
            "experts: first_dense 2 leaves none of the 2 layers for experts. Use 1 at most, or leave experts out",
        ),
        (
            "{kind: gpt, experts: {}}",
            "experts: experts are gated MLPs behind the attention. Leave experts out, or gated: false and parallel",
        ),
        ("{experts: {balance: bais}}", "did you mean 'bias'"),
        ("{biases: [out, router]}", "biases: without a mixture there is no linear layer router. Give experts, or leave router out"),
        (
            "{swiglu_limit: 7, activation: gelu}",
            "swiglu_limit: only a gated MLP with silu has it. Leave swiglu_limit out, or use gated: true",
        ),
    ],
)
def test_a_section_that_does_not_fit_is_refused(model, message):
    with pytest.raises(InputError) as error:
        load({}, [f"model={model}"])
    assert len(error.value.problems) == 1
    assert message.lower() in error.value.problems[0].lower()


def test_flops_count_the_chosen_experts_alone():
    dense = ModelConfig(layers=3, embed=16, heads=2, ffn=24, vocab=20, seq=6)
    mixed = replace(dense, experts=ExpertsConfig(count=8, choose=2, ffn=8, shared=1, first_dense=1))

    def flops(config):
        return config.flops_per_token(sum(x.size for x in jax.tree.leaves(jax.eval_shape(build(config).init, jax.random.key(0))[0])))

    # 2 chosen experts and a shared one are as wide as the MLP. The routers remain, in two layers.
    assert flops(mixed) - flops(dense) == 6 * 2 * 16 * 8
    # So do biases, of the chosen ones.
    assert flops(replace(mixed, biases=("experts",))) - flops(mixed) == 6 * 2 * 2 * (8 + 8 + 16)
