"""Runs of a tiny model with experts: the state of their balance, what is logged, and a run that is continued."""

import itertools
import shutil

import jax
import numpy as np
import pytest

import jgt
from train.models.experts.balance import EXPERT_LOAD
from train.run.train import train
from train.setup import prepare

EXPERTS = "model.experts={{count: 4, choose: 2, ffn: 16, balance_rate: 0.01, {}}}"
BIAS, LOSS = EXPERTS.format("balance: bias"), EXPERTS.format("balance: batch, z_loss: 0.01")


def batch_of(setup, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 256, (16, 33), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
    return jax.device_put(batch, setup.batch_shardings)


def layer_of(state):
    return jax.device_get(state.variables["layers"]["moe"])


@pytest.mark.slow
def test_a_step_moves_the_bias_by_the_loads_of_the_whole_batch(tiny):
    biases, loads = [], []
    for parts in (1, 4):
        setup = prepare(tiny(BIAS, f"train.accumulate={parts}"))
        state, step = setup.init(), setup.compile_train_step()
        for number in range(3):
            before = layer_of(state)["bias"]
            state, metrics = step(state, batch_of(setup, number), setup.settings(number + 1))
            load = jax.device_get(metrics[EXPERT_LOAD])
            # Loads are in mean loads.
            np.testing.assert_allclose(layer_of(state)["bias"], before + 0.01 * np.sign(1 - load), rtol=0, atol=1e-6)
            np.testing.assert_allclose(load.sum(-1), 4.0, rtol=1e-6)
        assert np.all(layer_of(state)["load"] == 0)
        biases.append(layer_of(state)["bias"])
        loads.append(load)
    assert np.any(biases[0])
    np.testing.assert_array_equal(*biases)
    np.testing.assert_allclose(*loads, rtol=1e-6)


def test_a_step_that_is_not_applied_moves_no_bias(tiny):
    setup = prepare(tiny(BIAS))
    state, step = setup.init(), setup.compile_train_step()
    batch = batch_of(setup)
    state, metrics = step(state, batch | {"weights": batch["weights"] * np.inf}, setup.settings(1))
    assert not metrics["applied"]
    assert not np.any(layer_of(state)["bias"])
    assert not np.any(layer_of(state)["load"])


def test_losses_of_the_router_are_trained_and_not_evaluated(tiny):
    found = {}
    for parts in (1, 4):
        setup = prepare(tiny(LOSS, f"train.accumulate={parts}"))
        state, batch = setup.init(), batch_of(setup)
        total, weight = setup.compile_eval_step(16)(state.params, state.variables, batch)["loss"]
        nats = float(total) / float(weight)
        state, metrics = setup.compile_train_step()(state, batch, setup.settings(1))
        found[parts] = {name: float(metrics[name]) for name in ("loss", "balance_loss", "z_loss")}
        # Two layers.
        terms = 2 * 0.01 * (found[parts]["balance_loss"] + found[parts]["z_loss"])
        assert found[parts]["loss"] == pytest.approx(nats + terms, rel=1e-6)
        assert found[parts]["balance_loss"] >= 1
    # A product of means, of a part of the batch each time.
    assert found[4]["z_loss"] == pytest.approx(found[1]["z_loss"], rel=1e-5)
    assert found[4]["balance_loss"] == pytest.approx(found[1]["balance_loss"], rel=0.2)


def test_a_run_continues_with_its_bias_and_its_records(tiny, tmp_path, read_rows):
    run = tiny(BIAS, "checkpoint.every=2", "train.steps=4", "optimizer.name=muon")
    train(run)
    folder = tmp_path / "run"

    def losses():
        return [row["loss"] for row in read_rows(folder / "metrics.jsonl")]

    def loads():
        return [(row["step"], row["load"]) for row in read_rows(folder / "experts.jsonl")]

    first = losses(), loads()
    assert [step for step, _ in first[1]] == [1, 2, 3, 4]
    assert np.shape(first[1][0][1]) == (2, 4)
    assert "load_max" in read_rows(folder / "metrics.jsonl")[0]
    shutil.rmtree(folder / "checkpoints" / "4")
    train(run)
    assert (losses(), loads()) == first


HOW = [("rounds", "exchange_rounds", 1, 2), pytest.param("drop", "exchange_dropped", 0, 0.125, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("over", "name", "equal", "skewed"), HOW)
def test_a_step_says_how_its_rows_were_exchanged(over, name, equal, skewed, tiny, rules_dir, tmp_path):
    rules = tmp_path / "rules.yaml"
    shipped = (rules_dir / "experts.yaml").read_text().replace("extends: ", f"extends: {rules_dir}/")
    rules.write_text(shipped.replace("capacity_factor: 1.25, over: rounds", f"capacity_factor: 1.75, over: {over}"))
    setup = prepare(tiny(BIAS.replace("choose: 2", "choose: 1"), f"rules={rules}", "mesh={data: 4, fsdp: 1, expert: 2}"))
    state, step, batch = setup.init(), setup.compile_train_step(), batch_of(setup)
    # All tokens of one kind choose the same expert, on one of two devices.
    same = {**batch, "inputs": jax.numpy.zeros_like(batch["inputs"])}
    for rows, expected in ((batch, equal), (same, skewed)):
        state, metrics = step(state, rows, setup.settings(1))
        assert {key: float(value) for key, value in metrics.items() if key.startswith("exchange_")} == {name: expected}


def test_experts_in_eight_bits_have_the_loss_of_one_device(tiny, rules_dir):
    found, split = [], (f"rules={rules_dir / 'experts.yaml'}", "mesh={data: 4, fsdp: 1, expert: 2}")
    for options in (["model.fp8=false"], ["model.fp8=true"], ["model.fp8=true", *split]):
        setup = prepare(tiny(BIAS, *options))
        state = setup.init()
        total, weight = setup.compile_eval_step(16)(state.params, state.variables, batch_of(setup))["loss"]
        found.append(float(total) / float(weight))
    plain, alone, exchanged = found
    assert exchanged == pytest.approx(alone, rel=1e-5)
    assert 0 < abs(alone - plain) < 0.02 * plain


SIZES = (1, 2, 4, 8)
PAIRS = [(4, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in itertools.permutations(SIZES, 2) if pair != (4, 2))]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_continues_where_experts_are_on_other_devices(before, after, tiny, tmp_path, read_rows, rules_dir):
    model = EXPERTS.format("balance: bias").replace("count: 4", "count: 8")
    layout = (model, f"rules={rules_dir / 'experts.yaml'}", "checkpoint.every=2", "train.steps=4")

    def run(size):
        train(tiny(*layout, f"mesh={{data: {8 // size}, fsdp: 1, expert: {size}}}"))
        found = {name: read_rows(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "experts")}
        return [row["loss"] for row in found["metrics"]], [row["load"] for row in found["experts"]]

    losses, loads = run(before)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    continued, loads_there = run(after)
    assert continued[:2] == losses[:2]
    np.testing.assert_allclose(continued, losses, rtol=1e-6)
    # A bias that was lost would send tokens elsewhere.
    assert loads_there == loads


LATENT = "model.latent={rank: 20, query_rank: 24, rope_dim: 4, value_dim: 12}"
DENSE = "model.experts={count: 4, choose: 2, ffn: 16, shared: 1, score: sigmoid, first_dense: 2}"
STAGES = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 2}")


def differentiated(run):
    """The loss of a batch, its gradient and the loads of experts, in the model's shapes."""
    setup = prepare(run, devices=jax.devices()[: 4 if run.pipeline else 1])
    state = setup.init()
    params, frozen = setup.trained.split(state.params)

    def step(params, frozen, variables, batch):
        (loss, part), gradient, _ = setup.gradients.differentiate(setup.objective.beside(frozen), params, variables, batch)
        return loss, setup.storage.left(gradient), part.variables["layers"]["moe"]["load"]

    return jax.device_get(jax.jit(step)(params, frozen, state.variables, batch_of(setup)))


@pytest.mark.slow
def test_dense_layers_run_before_those_of_a_pipeline(tiny):
    keys = (LATENT, DENSE, "model.heads=4", "model.kv_heads=null", "model.head_dim=12", "model.layers=6")
    loss, gradient, load = differentiated(tiny(*keys, "mesh={data: 1}", "rules=null"))
    for schedule in ("1f1b", "interleaved", "zb"):
        found = differentiated(tiny(*keys, *STAGES, f"pipeline={{signal: layers, microbatches: 4, schedule: {schedule}}}"))
        assert found[0] == pytest.approx(loss, rel=1e-6)
        np.testing.assert_array_equal(found[2], load)
        far = jax.tree.map(lambda x, wanted: np.abs(x - wanted).max() / np.abs(wanted).max(), found[1], gradient)
        assert max(jax.tree.leaves(far)) < 1e-5, schedule


def test_a_pipeline_runs_the_longest_stack(tiny):
    with pytest.raises(jgt.InputError, match=r"the longest stack of layers, but 2 of 4 layers are dense\. Use 1 at most"):
        tiny(DENSE, "model.layers=4", *STAGES, "pipeline={signal: layers, microbatches: 4}")
