"""Frozen parameters (`optimizer.train`): they never move, the others move as a plain optimizer moves them, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgt import path_text, plan
from jgt.document import InputError
from train.config import load
from train.setup import prepare
from train.step.optimizer import roles_of, settings_of_step

PATTERNS = ("layers/attn/**", "unembedding")
TRAIN = f"optimizer.train=[{', '.join(PATTERNS)}]"
SAME = ("optimizer.clip=0.2", "optimizer.eps=1e-3")
"""A larger eps than usual, so that the rounding of small gradients is not divided by their size."""
STEPS = 3
FSDP = ("rules=jgt:fsdp", "mesh={fsdp: 8}")
THREE = ("rules=jgt:fsdp_tensor", "mesh={data: 2, fsdp: 2, tensor: 2}")
STAGES = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}", "devices.virtual_cpu=4")
PIPELINE = "pipeline={signal: layers, microbatches: 4, schedule: %s}"


def batches():
    """A batch for each step: random tokens, some without weight."""
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = random.integers(0, 256, (16, 33), np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": random.integers(0, 2, (16, 32)).astype(np.float32)}


def flat(tree):
    return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def is_trained(path):
    return path.startswith("layers/attn/") or path.endswith("/unembedding")


def stepped(run):
    """The parameters before the first step and after the last one, in the model's shapes, the last state, and the gradients' norms."""
    setup = prepare(run, devices=jax.devices()[: run.config.devices.virtual_cpu or 8])
    state, step, norms = setup.init(), setup.compile_train_step(), []
    first = flat(setup.model_params(setup.last_params(state)))
    for number, batch in enumerate(batches(), 1):
        state, metrics = step(state, jax.device_put(batch, setup.batch_shardings), setup.settings(number))
        norms.append(float(np.mean(metrics["grad_norm"])))
    state = state if setup.phases is None else setup.compile_exchanges().whole(state)
    return first, flat(setup.model_params(setup.last_params(state))), state, norms


@pytest.fixture(scope="module")
def reference(tiny_file):
    """The same on one device: gradients by all parameters, those of frozen ones zeroed, and optax alone."""
    run = load(tiny_file, SAME)
    setup = prepare(run)
    config, model, state = run.config.optimizer, setup.program.model, setup.init()
    params, variables = state.params, state.variables
    trained = jax.tree.map_with_path(lambda path, _: is_trained(path_text(path)), params)
    decays = jax.tree.map(lambda role: role != "vector", roles_of(model, setup.storage))

    def loss(params, batch):
        nats = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, variables, batch["inputs"]), batch["targets"])
        return jnp.sum(nats * batch["weights"]) / jnp.sum(batch["weights"])

    @jax.jit
    def step(params, state, batch, lr):
        gradients = jax.tree.map(lambda g, own: g if own else jnp.zeros_like(g), jax.grad(loss)(params, batch), trained)
        adamw = optax.adamw(lr, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decays)
        whole = optax.multi_transform(
            {True: optax.chain(optax.clip_by_global_norm(config.clip), adamw), False: optax.set_to_zero()}, trained
        )
        state = whole.init(params) if state is None else state
        updates, state = whole.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(gradients)

    first, state, norms = flat(params), None, []
    for number, batch in enumerate(batches(), 1):
        params, state, norm = step(params, state, batch, settings_of_step(config, run.steps, number)[0])
        norms.append(float(norm))
    return first, flat(params), norms


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(FSDP, marks=pytest.mark.slow),
        THREE,
        pytest.param((*STAGES, PIPELINE % "1f1b"), marks=pytest.mark.slow),
        pytest.param((*STAGES, PIPELINE % "zb"), marks=pytest.mark.slow),
        pytest.param((*STAGES, "pipeline={signal: layers, microbatches: 4, schedule: 1f1b, remat: layer}"), marks=pytest.mark.slow),
        pytest.param((*THREE, "train.accumulate=2", "train.remat=block"), marks=pytest.mark.slow),
        pytest.param(("mesh={data: 8}", "rules=jgt:zero1"), marks=pytest.mark.slow),
        pytest.param(("mesh={data: 8}", "train.accumulate=2"), marks=pytest.mark.slow),
        pytest.param(("rules=jgt:overlap", "mesh={data: 1, fsdp: 2, tensor: 4}"), marks=pytest.mark.slow),
    ],
    ids=lambda overrides: "-".join(overrides) or "alone",
)
def test_each_layout_trains_as_optax_does_and_leaves_the_frozen_bits(tiny, reference, overrides):
    (first, last, state, norms), (expected_first, expected, expected_norms) = stepped(tiny(TRAIN, *SAME, *overrides)), reference
    np.testing.assert_allclose(norms, expected_norms, rtol=2e-5)
    for path, value in last.items():
        np.testing.assert_array_equal(first[path], expected_first[path], err_msg=path)
        if is_trained(path):
            assert (value != first[path]).any(), path
            np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=2e-7, err_msg=path)
        else:
            np.testing.assert_array_equal(value, first[path], err_msg=path)
    moments = {path for path, x in flat(state.opt_state).items() if x.ndim}
    assert moments
    assert all(is_trained(path.partition("/mu/")[2] or path.partition("/nu/")[2]) for path in moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.name=muon", *THREE),
        ("optimizer.name=muon", "optimizer.offload=host", *FSDP),
        ("model.dtype=bf16", "model.base_dtype=bf16", "optimizer.gradients=f32", *FSDP),
        ("model.dtype=bf16", "model.base_dtype=bf16", *STAGES, PIPELINE % "1f1b"),
        ("model.base_dtype=bf16", "train.accumulate=2", *THREE),
        ("model.dtype=bf16", "model.fp8=true", *FSDP),
        ("model.experts={count: 8, ffn: 32, shared: 1, balance: bias}", "rules=jgt:experts", "mesh={data: 2, fsdp: 1, expert: 4}"),
        ("train.ema=0.9", "model.vocab=257", *THREE),
        ("sync={axis: replica, every: 2, outer: {lr: 0.7, momentum: 0.9}}", "rules=jgt:hybrid", "mesh={replica: 2, fsdp: 4}"),
        ("sync={axis: replica, late: 1}", "rules=jgt:hybrid", "mesh={replica: 2, fsdp: 4}"),
        ("sync={axis: replica, wire: int8}", "train.accumulate=2", "rules=jgt:hybrid", "mesh={replica: 2, fsdp: 4}"),
    ],
    ids="-".join,
)
def test_every_feature_keeps_the_frozen_bits_and_moves_the_others(tiny, overrides):
    first, last, state, _ = stepped(tiny(TRAIN, *overrides))
    for path, value in last.items():
        same = (value == first[path]).all()
        assert same != is_trained(path), path
        if "model.base_dtype=bf16" in overrides:
            assert value.dtype == (np.float32 if is_trained(path) else jnp.bfloat16), path
    own = {path for part in (state.average, state.anchor, state.momentum, state.waiting) for path in flat(part)}
    assert all(map(is_trained, own))
    assert not any("/mlp/" in path or path.endswith("embed/embedding") for path in flat(state.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [(), FSDP, *[(*STAGES, PIPELINE % schedule) for schedule in ("1f1b", "gpipe", "zb")]],
    ids=["alone", "fsdp", "1f1b", "gpipe", "zb"],
)
def test_a_step_computes_no_gradient_of_frozen_weights(tiny, rules):
    def planned(*overrides):
        run = tiny("model.ffn=256", *overrides, *rules)
        setup = prepare(run, devices=jax.devices()[: run.config.devices.virtual_cpu or 8])
        return plan(setup.train_step(), *setup.step_shapes, rules=setup.run.rules)

    whole, norms = planned(), planned("optimizer.train=['*norm/scale']")
    # Forward, cotangents and weights are a third each, but attention's scores have no weights, and the first layer needs no cotangent.
    assert 0.65 < norms.flops_per_device / whole.flops_per_device < 0.73
    assert norms.memory.groups["optimizer state"] < 0.03 * whole.memory.groups["optimizer state"]
    assert norms.memory.groups["parameters"] == whole.memory.groups["parameters"]
    assert norms.memory.gradient_bytes < 0.03 * whole.memory.gradient_bytes


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["optimizer.train=[]"], ["optimizer.train: [] freezes all parameters"]),
        (
            ["optimizer.train=[attn/kernel, layers/mpl/**]"],
            [
                "optimizer.train: no parameter matches 'layers/mpl/**'. Did you mean 'layers/mlp/**'?",
                "optimizer.train: no parameter matches 'attn/kernel'",
            ],
        ),
        (["model.base_dtype=bf16"], ["model.base_dtype: bf16 is the type of frozen parameters"]),
    ],
    ids=["none", "misspelt", "base"],
)
def test_patterns_that_freeze_all_or_match_nothing_are_refused_with_their_line(tiny, overrides, messages):
    with pytest.raises(InputError) as error:
        prepare(tiny(*overrides))
    for message in messages:
        assert any(message in problem for problem in error.value.problems), error.value.problems
