"""Layers of several kinds, and linear attention: chunks are the recurrence, documents, caches, meshes, pipelines, torch's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS, config_of, expected, loaded, rounded, tolerance, variables_of

import jgt
from jgt import document
from jgt.document import Node, bind
from train.config import load
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.experts.config import ExpertsConfig
from train.models.recurrent.recurrence import TokenSteps, chunked, stepped
from train.models.stacks import stacks_of
from train.setup import prepare
from train.weights.described import published
from train.weights.load import open_files

LINEAR = {"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 12}
PATTERN = ["linear", "linear", "attention"]
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
STEP = (f"model.linear={LINEAR}", "model.pattern=[linear, attention]", "model.layers=8", "model.attention_gate=true")


def model_config(**keys):
    problems = []
    keys = {"layers": 6, "embed": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "seq": 160, "linear": LINEAR, "pattern": PATTERN, **keys}
    config = bind(Node.of(keys, "run", "model"), ModelConfig, problems)
    return config, [problem.partition(": ")[2] for problem in problems]


# -- the recurrence ------------------------------------------------------------------------------------------------


def steps_of(seq, *, with_beta, is_hard):
    """TokenSteps of two rows. is_hard: keys are nearly equal and nothing decays, so that powers of their products would overflow."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (2, seq, 2, 8)) for key in keys[:2])
    k = k[:, :1] + 0.01 * k if is_hard else k
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, decay, beta = (jax.random.normal(key, (2, seq, 2, 3, *size)) for key, size in zip(keys[2:], ((6,), (), ()), strict=True))
    decay = -jax.nn.softplus(decay) * (1e-3 if is_hard else 1)
    return TokenSteps(q, k, v, decay, jax.nn.sigmoid(beta + 5 * is_hard) if with_beta else None)


def one_by_one(steps, segments=None):
    seq = steps.q.shape[1]
    begins = jnp.zeros((2, seq), bool) if segments is None else segments == jnp.arange(seq)[None]

    def turn(state, own):
        step, begins = own
        state = jnp.where(begins[:, None, None, None, None], 0, state)
        return stepped(state, jax.tree.map(lambda x: x[:, None], step))

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (steps, begins))
    state, y = jax.lax.scan(turn, jnp.zeros((2, 2, 3, 8, 6)), by_token)
    return state, jnp.moveaxis(y[:, :, 0], 0, 1)


def compared(fn, steps):
    def total(steps):
        state, y = fn(steps)
        return jnp.sum(jnp.sin(state)) + jnp.sum(jnp.sin(y)), (state, y)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(steps)


@pytest.mark.parametrize(("with_beta", "is_hard"), [(True, False), (True, True), (False, False)])
def test_chunks_are_the_recurrence(with_beta, is_hard):
    steps = steps_of(150, with_beta=with_beta, is_hard=is_hard)
    # Documents begin within chunks, at their beginning and right behind it.
    segments = jnp.array([np.repeat([0, 30, 100], [30, 70, 50]), np.repeat([0, 64, 65, 128], [64, 1, 63, 22])])
    for own in (None, segments):
        (_, values), gradient = compared(lambda x, own=own: chunked(x, own), steps)
        (_, slow), slow_gradient = compared(lambda x, own=own: one_by_one(x, own), steps)
        for found, wanted in zip(jax.tree.leaves((values, gradient)), jax.tree.leaves((slow, slow_gradient)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * float(jnp.abs(wanted).max()))


def test_documents_reset_the_state():
    steps, segments = steps_of(90, with_beta=True, is_hard=False), jnp.array([np.repeat([0, 40], [40, 50])] * 2)
    run = jax.jit(chunked)
    state, packed = run(steps, segments)
    apart, alone = run(jax.tree.map(lambda x: x[:, 40:], steps))
    np.testing.assert_allclose(packed[:, 40:], alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, apart, rtol=0, atol=1e-5)
    assert np.abs(run(steps)[1][:, 40:] - alone).max() > 0.1


# -- stacks --------------------------------------------------------------------------------------------------------


def test_layers_that_repeat_are_one_stack_and_others_several():
    def parts(config):
        return [("".join(kind[0] for kind in stack.kinds), stack.count, stack.name, stack.first) for stack in stacks_of(config)]

    assert parts(model_config(layers=12)[0]) == [("lla", 4, "layers", 0)]
    assert parts(ModelConfig(layers=12)) == [("a", 12, "layers", 0)]
    nano = tuple("linear" if kind == "M" else "attention" for kind in NANO)
    found = parts(model_config(layers=52, pattern=nano)[0])
    assert "".join(kinds * count for kinds, count, *_ in found) == "".join(kind[0] for kind in nano)
    assert sum(len(kinds) for kinds, *_ in found) == 12
    assert [name for _, _, name, _ in found] == [f"layers_{n}" for n in range(len(found))]
    assert parts(ModelConfig(layers=5, experts=ExpertsConfig(count=4, first_dense=1))) == [("a", 1, "dense", 0), ("a", 4, "layers", 1)]


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (2, ["linear", "attention"]),
        pytest.param(7, PATTERN, marks=pytest.mark.slow),
        pytest.param(7, [*PATTERN, "attention", "attention", "linear", "linear"], marks=pytest.mark.slow),
    ],
    ids=["short", "periodic", "other"],
)
def test_a_text_read_and_written_is_the_text_at_once(layers, pattern):
    windows = {"window": 6, "full_layers": [5]} if layers > 5 else {}
    config, _ = model_config(layers=layers, pattern=pattern, qk_norm="head", attention_gate=True, **windows)
    model = build(config)
    params, variables = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 96), 0, 64)
    whole = jax.jit(model.apply)(params, variables, tokens)

    def run(use):
        return model.run(use, params, variables, False)[0]

    lengths = jnp.array([2, 75])
    logits, cache = jax.jit(lambda: run(lambda m: m.read(tokens[:, :80], lengths, jnp.int32(0), 96)))()
    np.testing.assert_allclose(logits, [whole[0, 1], whole[1, 74]], rtol=0, atol=2e-5)
    write = jax.jit(lambda now, before: run(lambda m: m.write(tokens[jnp.arange(2), now], now, before)))
    for _ in range(6):
        logits, cache = write(lengths, cache)
        np.testing.assert_allclose(logits, whole[jnp.arange(2), lengths], rtol=0, atol=2e-5)
        lengths = lengths + 1
    # States have the size of a few tokens, whatever the number of slots.
    assert cache.linear.matrices.shape == (config.kinds.count("linear"), 2, 2, 2, 8, 12)
    assert cache.linear.v.shape == (config.kinds.count("linear"), 2, 3, 48)


def test_flops_count_the_recurrence_and_attention_where_it_is():
    config, plain = model_config()[0], model_config(linear=None, pattern=[])[0]
    found = config.flops_per_token(1000) - plain.flops_per_token(1000)
    assert found == 18 * 4 * 4 * 8 * 12 - 4 * 6 * 4 * 16 * config.seq / 2


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"pattern": []}, "layers with linear attention need pattern and linear. Give pattern, too, or leave linear out"),
        ({"linear": None}, "layers with linear attention need pattern and linear. Give linear, too, or leave pattern out"),
        ({"pattern": ["linear"]}, "no layer has attention. Use attention for one of them at least"),
        ({"linear": {**LINEAR, "key_heads": 3}}, "heads 4 is not divisible by key_heads 3. Use a divisor of 4"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(keys, problem):
    assert problem in str(model_config(**keys)[1])


def test_a_split_sequence_is_refused_with_the_line(tmp_path):
    model = {"layers": 3, "embed": 32, "heads": 4, "linear": LINEAR, "pattern": PATTERN, "seq": 64}
    keys = {"model": model, "mesh": {"data": 2, "fsdp": 1, "seq": 4, "tensor": 1}, "rules": "jgt:context", "devices": {"virtual_cpu": 8}}
    file = tmp_path / "run.yaml"
    file.write_text(document.dump(keys))
    with pytest.raises(jgt.InputError, match=r"run.yaml:\d+: model.linear: .* but the rules split the sequence over seq"):
        prepare(load(file), num_devices=8)


# -- published models ----------------------------------------------------------------------------------------------


def the_loss(model, variables, tokens):
    def loss(params):
        logits = model.apply(params, variables, tokens)
        logs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)), logits

    return loss


def largest(found, wanted):
    return jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max() / (np.abs(y).max() + 1e-9)), found, wanted))


@pytest.mark.parametrize(
    "name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow), pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_most_logits_are_as_close_as_those_of_attention(name):
    config = config_of(name)
    (tokens, wanted, std), apply = expected(name), jax.jit(build(config).apply)
    error = np.abs(apply(loaded(name, config), variables_of(name, config), tokens)[:, ::5] - wanted) / std
    assert np.median(error) < 5e-6
    assert tolerance(name) < 1e-3


def test_without_a_part_of_linear_attention_logits_are_others():
    config = config_of("qwen3_5")
    params, variables, (tokens, wanted, std) = loaded("qwen3_5", config), variables_of("qwen3_5", config), expected("qwen3_5")
    apply, layer = jax.jit(build(config).apply), params["layers"]["linear_0"]
    for name in ("decay_rate", "decay_bias", "q_conv", "k_conv", "v_conv", "beta_proj", "gate_proj", "norm"):
        attn = {**layer["attn"], name: jax.tree.map(lambda x: 0.5 * x, layer["attn"][name])}
        layers = {**params["layers"], "linear_0": {**layer, "attn": attn}}
        found = apply({**params, "layers": layers}, variables, tokens)
        assert np.abs(found[:, ::5] - wanted).max() > 1e-2 * std, name


@pytest.mark.slow
def test_gradients_are_those_of_torch():
    config = config_of("qwen3_next")
    params, variables = loaded("qwen3_next", config), variables_of("qwen3_next", config)
    gradient = jax.jit(jax.grad(the_loss(build(config), variables, expected("qwen3_next")[0]), has_aux=True))
    found, again = gradient(params)[0], gradient(rounded(params))[0]
    files = open_files(published(GOLDENS.parent / "gradients" / "qwen3_next"), config, jax.tree.map(jax.typeof, params))
    wanted = files.load(params, jax.tree.map(lambda x: x.sharding, params))
    assert max(largest(found, wanted)) < 3 * max(largest(again, found))
    assert np.median(largest(found, wanted)) < 3 * np.median(largest(again, found))


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "mesh"), [("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2}), ("fsdp", {"fsdp": 8})])
def test_logits_and_gradients_are_the_same_on_meshes(rules, mesh):
    config = config_of("qwen3_5")
    model, variables = build(config), variables_of("qwen3_5", config)
    params = jax.device_get(loaded("qwen3_5", config))
    tokens, wanted, std = expected("qwen3_5")
    loss = the_loss(model, variables, np.tile(tokens, (4, 1)))
    plain, again = (jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(p)[0]) for p in (params, rounded(params)))
    read = jgt.load_rules(GOLDENS.parents[2] / "configs" / "rules" / f"{rules}.yaml")
    gradient, logits = jax.jit(jax.grad(jgt.shard(loss, read, jgt.make_mesh(mesh), partial=True), has_aux=True))(params)
    assert np.abs(logits[:2, ::5] - wanted).max() < 3e-4 * std
    assert max(largest(jax.device_get(gradient), plain)) < 3 * max(largest(again, plain))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb"])
def test_a_step_in_a_pipeline_is_the_step(tiny, schedule):
    stages = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}")
    stages += (f"pipeline={{signal: layers, schedule: {schedule}, microbatches: 4}}",)
    found = []
    for layout in (("mesh={data: 1}", "rules=null"), stages):
        run = tiny(*STEP, *layout)
        setup = prepare(run, devices=jax.devices()[: 4 if run.pipeline else 1])
        state, step = setup.init(), setup.compile_train_step()
        tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
        for number in range(2):
            state, metrics = step(state, jax.device_put(batch, setup.batch_shardings), setup.settings(number + 1))
            found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    # The first step of AdamW turns roundings of gradients near 0 into updates, and so the second gradient is another one.
    (losses, norms), (other_losses, other_norms) = (np.transpose(found[n : n + 2]) for n in (2, 0))
    np.testing.assert_allclose([*losses, norms[0]], [*other_losses, other_norms[0]], rtol=1e-5)
