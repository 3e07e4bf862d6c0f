"""State, such as running statistics and random streams, is not the batch; a sharded program changes it as the unsharded one does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jgt
from jgt.signal import context

MESH = jgt.make_mesh({"data": 2, "tensor": 4})
BATCHES = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
RULES = jgt.make_rules(
    {
        "axes": {"batch": ["data"]},
        "signals": {"mlp": {"params": {"up/kernel": [None, "tensor"], "down/kernel": ["tensor", None]}, "out": ["batch", None]}},
        "default": "replicate",
    }
)


class Net(nnx.Module):
    """Batch statistics of 30 units, which no axis of the batch divides, and noise."""

    def __init__(self, rngs):
        # A bias before a normalisation has a gradient of rounding errors, which Adam would enlarge.
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 30, use_bias=False, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(30, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        with context("mlp"):
            h = self.down(jax.nn.relu(self.up(x)))
        return self.drop(self.norm(h))


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def net():
    return Net(nnx.Rngs(0))


def assert_near(actual, expected):
    def near(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    jax.tree.map(near, actual, expected)


def trained(loss):
    """Losses, gradients and every variable of the usual loop: module whole, nnx transformations, nnx.Optimizer."""
    model = net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value, gradients

    steps = [step(model, optimizer, x) for x in BATCHES]
    return steps, nnx.state(model), nnx.state(optimizer)


def test_a_module_whole_trains_as_it_does_unsharded():
    actual, expected = trained(jgt.shard(loss, RULES, MESH)), trained(loss)
    assert_near(actual, expected)
    state = actual[1]
    assert state["drop"]["rngs"]["count"].get_value() == len(BATCHES)
    assert not np.allclose(state["norm"]["mean"].get_value(), 0)
    assert state["norm"]["mean"].get_value().sharding.is_fully_replicated
    assert actual[0][0][1]["up"]["kernel"].get_value().sharding.spec == P(None, "tensor")


TRANSFORMS = {
    "eager": lambda loss: loss,
    "jit": nnx.jit,
    "grad": nnx.grad,
    "value_and_grad": nnx.value_and_grad,
    "jit of grad": lambda loss: nnx.jit(nnx.grad(loss)),
    "remat": nnx.remat,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nnx_transformations_store_the_state(transform):
    found = []
    for fn in (jgt.shard(loss, RULES, MESH), loss):
        model = net()
        run = TRANSFORMS[transform](fn)
        found.append(([run(model, x) for x in BATCHES[:2]], nnx.state(model)))
    assert_near(*found)


def split_loss(loss):
    """The loss as a pure function, as the guide of nnx for JAX's own transformations has it."""
    graph, params, rest = nnx.split(net(), nnx.Param, ...)

    def pure(params, rest, x):
        # Variables of a trace around cannot change, so the model has its own.
        model = nnx.merge(graph, params, rest, copy=True)
        value = loss(model, x)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    return pure, params, rest


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_jax_transformations_return_the_state(where):
    found = []
    for is_sharded in (True, False):
        shard = (lambda fn: jgt.shard(fn, RULES, MESH)) if is_sharded else (lambda fn: fn)
        pure, params, rest = split_loss(shard(loss) if where == "inside" else loss)
        step = jax.jit(jax.value_and_grad(shard(pure) if where == "outside" else pure, has_aux=True))
        for x in BATCHES[:3]:
            (value, rest), gradients = step(params, rest, x)
        found.append((value, rest, gradients))
    assert_near(*found)


def test_a_merged_module_may_share_the_variables_of_its_arguments():
    graph, params, rest = nnx.split(net(), nnx.Param, ...)
    found = []
    for shard in (lambda fn: jgt.shard(fn, RULES, MESH), lambda fn: fn):
        own = jax.tree.map(lambda x: x, rest)
        fn = shard(lambda params, rest, x: loss(nnx.merge(graph, params, rest), x))
        found.append((fn(params, own, BATCHES[0]), fn(params, own, BATCHES[1]), own))
    assert_near(*found)
    assert found[0][2]["drop"]["rngs"]["count"].get_value() == 2


def test_state_is_placed_beside_parameters_and_made_with_them():
    sharded = jgt.shard(loss, RULES, MESH)
    placement = sharded.placement(nnx.eval_shape(net), BATCHES[0])
    assert not [p.path for p in placement.parameters if "mean" in p.path or "rngs" in p.path]
    assert placement.params.norm.mean.get_value().spec == P()
    model = sharded.init(net, batch=BATCHES[0])
    assert model.up.kernel.get_value().sharding.spec == P(None, "tensor")
    assert sharded(model, BATCHES[0]) == pytest.approx(float(loss(net(), BATCHES[0])), abs=1e-5)


def test_a_rule_that_names_state_places_it():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "inputs": {"mean": ["tensor"], "*": ["batch", ...]}, "default": "replicate"})
    fn = lambda model, x: jnp.mean(model(x))  # noqa: E731
    placement = jgt.place(fn, rules, MESH, nnx.BatchNorm(8, rngs=nnx.Rngs(0)), BATCHES[0, :, :8])
    assert placement.params.mean.get_value().spec == P("tensor")
    assert placement.params.var.get_value().spec == P()


class Shared(nnx.Module):
    """One module of statistics at two places."""

    def __init__(self):
        self.first = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.second = self.first

    def __call__(self, x):
        return self.second(self.first(x) * 2 + 1)


@pytest.mark.slow
def test_state_that_is_shared_stays_one_variable():
    found = []
    for fn in (jgt.shard(loss, RULES, MESH, partial=True), loss):
        model = Shared()
        found.append((fn(model, BATCHES[0]), fn(model, BATCHES[1]), nnx.state(model)))
        assert model.first is model.second
    assert_near(*found)


def test_a_module_in_another_argument_is_state():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})

    def distance(params, teacher, x):
        return jnp.mean((x @ params["w"] - teacher(x)) ** 2)

    params, teacher = {"w": jnp.ones((16, 30))}, net()
    other = net()
    assert_near(jgt.shard(distance, rules, MESH)(params, teacher, BATCHES[0]), distance(params, other, BATCHES[0]))
    assert_near(nnx.state(teacher), nnx.state(other))


# -- pure functions


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        with context("mlp"):
            h = nn.Dense(30, name="down")(nn.relu(nn.Dense(32, name="up")(x)))
        h = nn.BatchNorm(use_running_average=False, name="norm")(h)
        return nn.Dropout(0.5, deterministic=False)(h)


def linen_loss(params, state, x, key):
    out, new = LinenNet().apply({"params": params, **state}, x, mutable=["batch_stats"], rngs={"dropout": key})
    return jnp.mean((out - 1) ** 2), new


def linen_args():
    variables = LinenNet().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCHES[0])
    return variables.pop("params"), variables


def test_an_argument_that_is_state():
    params, stats = linen_args()
    found = []
    for fn in (jgt.shard(linen_loss, RULES, MESH, state="state"), linen_loss):
        step, new = jax.jit(jax.value_and_grad(fn, has_aux=True)), stats
        for n, x in enumerate(BATCHES):
            (value, new), gradients = step(params, new, x, jax.random.key(n))
        found.append((value, new, gradients))
    assert_near(*found)


def test_an_argument_that_is_not_said_to_be_state_is_split_like_the_batch():
    # The reason for the test above: without `state` the 30 units count as rows.
    params, stats = linen_args()
    with pytest.raises(jgt.InputError, match="norm/mean"):
        jgt.shard(linen_loss, RULES, jgt.make_mesh({"data": 4, "tensor": 2}))(params, stats, BATCHES[0], jax.random.key(0))


def test_state_is_replicated_unless_a_rule_names_it():
    fn = lambda params, state, batch: jnp.sum(batch["x"] @ params["w"]) + jnp.sum(state["mean"])  # noqa: E731
    args = {"w": jnp.ones((8, 8))}, {"mean": jnp.ones(8), "var": jnp.ones(8)}, {"x": jnp.ones((8, 8))}

    def specs(inputs, state="state"):
        rules = jgt.make_rules({"axes": {"batch": ["data"]}, "inputs": inputs, "default": "replicate"})
        placement = jgt.place(fn, rules, MESH, *args, state=state)
        assert placement == jgt.place(jgt.shard(fn, rules, MESH, state="state"), rules, MESH, *args)
        assert placement.inputs(args[2])["x"].spec == P("data", None)
        return {name: s.spec for name, s in placement.inputs(args[1], "state").items()}

    for state in ("state", 1, ["state"], [1]):
        assert specs(["batch", ...], state) == {"mean": P(), "var": P()}
    assert specs({"**": ["batch", ...]}) == {"mean": P(), "var": P()}
    assert specs({"*/*": ["batch", ...]}) == {"mean": P(), "var": P()}
    assert specs({"state/**": ["tensor"], "*": ["batch", ...]}) == {"mean": P("tensor"), "var": P("tensor")}
    assert specs({"*": ["batch", ...], "mean": ["tensor"]}) == {"mean": P("tensor"), "var": P()}


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("stat", ValueError, "the function has no argument 'stat'. Did you mean 'state'?"),
        (0, ValueError, "the first argument contains the parameters"),
        ("params", ValueError, "the first argument contains the parameters"),
        (True, TypeError, "must be the name or the position of an argument, or several of them, not True"),
        ([1.0], TypeError, "must be the name or the position of an argument, or several of them, not 1.0"),
    ],
)
def test_state_that_is_no_argument(state, error, said):
    with pytest.raises(error, match=said):
        jgt.shard(lambda params, state, batch: None, RULES, MESH, state=state)


# -- pipelines


def layers(params, state, x):
    """Four layers, and a running mean of what leaves them; the state has as many rows as the batch."""

    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    with context("layers"):
        h, _ = jax.lax.scan(layer, x, params["w"])
    value = jnp.mean((h - state["shift"][:, None].mean()) ** 2)
    return value, {"shift": 0.9 * state["shift"] + 0.1 * jnp.mean(h), "steps": state["steps"] + 1}


def test_state_is_not_cut_into_microbatches():
    mesh = jgt.make_mesh({"data": 2, "stage": 4})
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    pipelined = jgt.shard(layers, rules, mesh, state="state", pipeline=jgt.Pipeline(signal="layers", microbatches=4))
    params, state = {"w": jax.random.normal(jax.random.key(0), (4, 16, 16)) / 4}, {"shift": jnp.ones(8), "steps": jnp.zeros((), jnp.int32)}
    actual, expected = (jax.jit(jax.value_and_grad(fn, has_aux=True))(params, state, BATCHES[0]) for fn in (pipelined, layers))
    assert_near(actual, expected)


class Stack(nnx.Module):
    """Layers in a scan, with a variable that counts steps and one that follows the mean of the activations."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 16, 16)) / 4)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        with context("layers"):
            h, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, self.w.get_value())
        self.steps.set_value(self.steps.get_value() + 1)
        self.mean.set_value(0.9 * self.mean.get_value() + 0.1 * jax.lax.stop_gradient(jnp.mean(h)))
        return h


@pytest.mark.slow
def test_a_module_whole_in_a_pipeline_keeps_its_state():
    mesh = jgt.make_mesh({"data": 2, "stage": 4})
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    found = []
    for fn in (jgt.shard(loss, rules, mesh, pipeline=jgt.Pipeline(signal="layers", microbatches=4)), loss):
        model = Stack(nnx.Rngs(0))
        step = nnx.jit(nnx.value_and_grad(fn))
        found.append(([step(model, x) for x in BATCHES[:2]], nnx.state(model)))
    assert_near(*found)
