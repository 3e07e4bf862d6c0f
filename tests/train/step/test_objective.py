"""Losses of the user's own: means, weighted sums and metrics, whole and in parts, and models with state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jgt.document import InputError
from train.models.model import of_flax
from train.step.gradients import GradientSum
from train.step.objective import Objective, check_results, checked_loss, own_objective
from train.step.state import State
from train.step.step import make_eval_step, make_train_step

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32),
    "weight": np.float32([1, 2, 0, 1, 3, 1, 0.5, 1]),
}


class Linear(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (5, 3)))

    def __call__(self, x):
        return x @ self.w[...]


def errors(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=1)


def mean(model, batch):
    return errors(model, batch).mean(), {"largest": errors(model, batch).mean() * 2}


def weighted(model, batch):
    total = (errors(model, batch) * batch["weight"]).sum()
    return (total, batch["weight"].sum()), {"share": ((batch["weight"] * 3).sum(), batch["weight"].sum())}


def stepped(make, loss, accumulate=1, steps=1, batch=BATCH):
    """The state, the metrics and the change of the parameters after steps of gradient descent with rate 1."""
    model = of_flax(make, lambda module: loss(module, batch))
    plain = {flag: own_objective(model, loss, "run.yaml:1", is_training=flag) for flag in (True, False)}
    objective = Objective(loss=plain[True], evaluated=plain[False], is_token_loss=False)
    optimizer = optax.sgd(1.0)
    step = jax.jit(make_train_step(objective, lambda settings: optimizer, gradients=GradientSum(parts=accumulate, pin=lambda g: g)))
    params, variables = model.init(jax.random.key(0))
    state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params), variables)
    for _ in range(steps):
        state, metrics = step(state, batch, np.zeros(3, np.float32))
    return model, objective, state, metrics, jax.tree.map(jnp.subtract, params, state.params)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize(("loss", "weights"), [(mean, np.ones(8)), (weighted, BATCH["weight"])], ids=["mean", "weighted"])
def test_a_loss_is_the_whole_batchs_in_parts_too(loss, weights, accumulate):
    _, objective, state, metrics, gradient = stepped(Linear, loss, accumulate)
    w = state.params["w"] + gradient["w"]

    def expected(w):
        return jnp.sum(jnp.asarray(weights) * jnp.sum((BATCH["x"] @ w - BATCH["y"]) ** 2, axis=1)) / weights.sum()

    value, slope = jax.value_and_grad(expected)(w)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(gradient["w"], slope, rtol=1e-4, atol=1e-5)
    assert float(metrics.get("share", 3)) == 3 and float(metrics.get("largest", 2 * value)) == pytest.approx(2 * float(value), rel=1e-5)
    sums = make_eval_step(objective)({"w": w}, state.variables, BATCH)
    np.testing.assert_allclose(sums["loss"][0] / sums["loss"][1], value, rtol=1e-5)


@pytest.mark.parametrize(
    "result", [jnp.ones(3), jnp.int32(2), jnp.int32(2) > 1, "text", (1.0, 2.0, 3.0), (3, 1.0), (1.0, {"m": jnp.ones(2)})]
)
def test_another_result_is_refused(result):
    with pytest.raises(InputError, match=r"run.yaml:1: train.loss.*(returned|Return a scalar)"):
        stepped(Linear, lambda model, batch: result)


def test_a_metric_cannot_replace_what_the_step_itself_reports():
    with pytest.raises(InputError, match="a metric cannot be called 'applied'"):
        stepped(Linear, lambda model, batch: (errors(model, batch).mean(), {"applied": 1.0}))


def test_an_array_that_the_batch_does_not_have():
    with pytest.raises(InputError, match=r"failed: .*test_objective\.py:\d+: KeyError: 'z'\. The arrays of a batch are weight, x, y"):
        stepped(Linear, lambda model, batch: batch["z"])


@pytest.mark.parametrize(
    "use", [float, bool, np.asarray, lambda x: x.item(), lambda x: [1, 2][x.astype(int)], lambda x: jnp.ones(3)[x > jnp.zeros(3)]]
)
def test_a_value_that_is_converted_while_it_is_traced_is_one_line_with_a_remedy(use):
    with pytest.raises(InputError) as caught:
        stepped(Linear, lambda model, batch: use(errors(model, batch).mean()))
    (line,) = caught.value.problems
    assert "JAX traces the function without values: use jnp.where" in line and "\\n" not in line and len(line) < 400


def with_shapes(loss):
    model = of_flax(Linear, lambda module: loss(module, BATCH))
    shapes = (*jax.eval_shape(model.init, jax.random.key(0)), BATCH)
    check_results(own_objective(model, loss, "run.yaml:1", is_training=True), shapes, "run.yaml:1")


@pytest.mark.parametrize("loss", [lambda m, b: 3.0, lambda m, b: b["x"].mean(), lambda m, b: (b["x"].mean(), errors(m, b).sum())])
def test_a_loss_that_does_not_depend_on_the_model_is_refused(loss):
    with pytest.raises(InputError, match=r"run.yaml:1: train.loss: does not depend on the model's parameters"):
        with_shapes(loss)


def test_a_second_number_that_depends_on_the_model_is_no_weight():
    def accuracy(model, batch):
        return (errors(model, batch) < 1).mean()

    with pytest.raises(InputError, match=r"the second one depends on the model's parameters. For a metric return \(loss, {'accuracy'"):
        with_shapes(lambda m, b: (errors(m, b).mean(), accuracy(m, b)))
    with_shapes(lambda m, b: (errors(m, b).mean(), {"accuracy": accuracy(m, b)}))

    def summed(model, batch):
        # Sum and weight come out of one loop, as in a loss in chunks.
        def add(sums, x):
            return (sums[0] + model(x).sum(), sums[1] + (x > 0).sum()), None

        return jax.lax.scan(add, (0.0, 0), batch["x"][:, None])[0]

    with_shapes(summed)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda model: 0, r"<lambda>\(model\) cannot be called as <lambda>\(model, batch\): too many positional arguments"),
        (lambda params, model, batch: 0, "missing a required argument: 'batch'"),
        (lambda *, model, batch: 0, "too many positional arguments"),
        (lambda train, model, batch: 0, "multiple values for argument 'train'"),
    ],
)
def test_a_loss_with_other_arguments_is_refused_with_its_line(loss, expected):
    with pytest.raises(InputError, match=rf"^run.yaml:1: train.loss: .*objective.py:\d+: .*{expected}. Write loss\(model, batch\), or"):
        checked_loss(loss, "run.yaml:1")


@pytest.mark.parametrize("loss", [lambda m, b: 0, lambda m, b, train: 0, lambda *both: 0, lambda m, b, scale=1.0: 0])
def test_arguments_of_a_loss(loss):
    assert checked_loss(loss, "run.yaml:1") is loss


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm, self.dropout = nnx.Linear(5, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


class LinenNormed(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(3)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)


def linen_loss(model, batch, train=True):
    return jnp.mean((model(batch["x"], train) - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("make", "loss"), [(Normed, lambda m, b: errors(m, b).mean()), (lambda rngs: LinenNormed(), linen_loss)], ids=["nnx", "linen"]
)
def test_statistics_and_random_keys_are_state(make, loss):
    model, objective, state, _, _ = stepped(make, loss, steps=3)
    _, before = model.init(jax.random.key(0))
    assert jax.tree.structure(before) == jax.tree.structure(state.variables)
    assert all(x.dtype in (np.float32, np.uint32) for x in jax.tree.leaves(state.variables))
    counts = [x for x in jax.tree.leaves(state.variables) if x.shape == () and x.dtype == np.uint32]
    assert 3 in [int(x) for x in counts]
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.variables), strict=True))
    # An evaluation draws nothing: the same twice.
    twice = [float(make_eval_step(objective)(state.params, state.variables, BATCH)["loss"][0]) for _ in range(2)]
    assert twice[0] == twice[1]


def test_an_nnx_model_trains_as_its_own_loop_does():
    _, _, state, _, _ = stepped(Normed, lambda m, b: errors(m, b).mean(), steps=3)
    module = Normed(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(module, optax.sgd(1.0), wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(module, nnx.grad(lambda m: errors(m, BATCH).mean())(module))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    found = state.variables["norm"]
    np.testing.assert_allclose(found["mean"], module.norm.mean[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["var"], module.norm.var[...], rtol=1e-5, atol=1e-6)


class Keeps(Linear):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.doubled, self.inner = None, Linear(rngs)


@pytest.mark.parametrize("place", ["cache", "inner/kept"])
def test_an_array_that_a_loss_writes_into_the_model_is_refused(place):
    def loss(model, batch):
        setattr(model if place == "cache" else model.inner, place.split("/")[-1], batch["x"])
        return errors(model, batch).mean()

    with pytest.raises(InputError, match=f"^run.yaml:1: train.loss: the model's attribute {place} was set to an array, which is not "):
        stepped(Keeps, loss)


def test_an_attribute_that_a_model_declares_carries_a_value_to_its_loss():
    def loss(model, batch):
        model.doubled = 2 * errors(model, batch).mean()
        return model.doubled

    assert stepped(Keeps, loss)
