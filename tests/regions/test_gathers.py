"""`gather: int8`: weights travel in eight bits, and everything else is the program at the rounded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from jgt import InputError
from jgt.regions import block_of
from jgt.replicas import restored, rounded
from jgt.signal import context

LAYERS, EMBED, FFN = 3, 16, 256
RULES = {
    "inputs": [["replica", "fsdp"], ...],
    "signals": {"mlp": {"params": {"up": ["fsdp", None], "down": [None, "fsdp"]}, "gather": {"*": "int8"}}},
}


def mlp(remat=None):
    """A loss of stacked layers."""

    def layer(x, weights):
        with context("mlp"):
            return x + jnp.tanh(x @ weights["up"].astype(x.dtype)) @ weights["down"].astype(x.dtype), None

    def loss(params, x):
        body = layer if remat is None else jax.checkpoint(layer, policy=None if remat == "block" else jax.checkpoint_policies.dots_saveable)
        return jnp.mean(jnp.square(jax.lax.scan(body, x, params)[0]))

    return loss


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (LAYERS, EMBED, FFN), "down": (LAYERS, FFN, EMBED)}
    params = {name: jax.random.normal(key, shape) / 8 for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    return params, jax.random.normal(keys[2], (16, EMBED))


def rounded_weights(params):
    """As they arrive: blocks of 256 along the dim of that size, which no axis splits."""

    def one(x, dim, block):
        blocks = x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
        return restored(*rounded(blocks, dim + 1)).reshape(x.shape)

    return {"up": one(params["up"], 2, 256), "down": one(params["down"], 1, 256)}


@pytest.mark.parametrize("remat", [None, "block", "dots"])
def test_loss_and_gradients_are_those_at_the_rounded_weights(arrays, remat):
    params, x = arrays
    loss = jgt.shard(mlp(remat), RULES, jgt.make_mesh({"replica": 2, "fsdp": 4}))
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, x)
    expected, plain = jax.value_and_grad(mlp())(rounded_weights(params), x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradients, plain)
    assert abs(float(value) - float(mlp()(params, x))) > 1e-6 * float(value)


def test_a_block_that_is_not_finite_is_nan(arrays):
    params, x = arrays
    params = params | {"up": params["up"].at[1, 3, 5].set(jnp.inf)}
    assert np.isnan(jax.jit(jgt.shard(mlp(), RULES, jgt.make_mesh({"replica": 2, "fsdp": 4})))(params, x))


def test_replicas_under_a_vmap_gather_their_own(arrays):
    params, x = arrays
    mesh = jgt.make_mesh({"replica": 2, "fsdp": 4})
    gradient = jax.vmap(jax.grad(jgt.shard(mlp(), RULES, mesh)), spmd_axis_name="replica")
    both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    found = jax.jit(gradient)(both, x.reshape(2, 8, EMBED))
    second = jax.grad(mlp())(rounded_weights(jax.tree.map(lambda p: 2 * p, params)), x[8:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6), found, second)


def test_an_axis_of_one_device_gathers_nothing(arrays):
    params, x = arrays
    loss = jgt.shard(mlp(), RULES, jgt.make_mesh({"replica": 8, "fsdp": 1}))
    np.testing.assert_allclose(jax.jit(loss)(params, x), mlp()(params, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((64, 512), (("fsdp",), ()), (1, 256)),
        ((64, 192), (("fsdp",), ()), (1, 192)),
        ((512, 64), (("fsdp",), ()), (0, 128)),
        ((64, 320), (("fsdp",), ()), (1, 160)),
        ((256, 256), ((), ()), (1, 256)),
        ((64, 64), (("fsdp",), ()), None),
        ((255, 64), (("fsdp",), ()), None),
    ],
)
def test_blocks_lie_along_a_dim_within_a_device(shape, dims, expected):
    assert block_of(shape, dims, {"fsdp": 4}) == expected


@pytest.mark.parametrize(
    ("params", "gather", "message"),
    [
        ({"*": ["fsdp", None]}, {"upp": "int8"}, "mlp: gather: upp: no parameter used below this signal, and nowhere else, matches"),
        ({"*": []}, {"up": "int8"}, "gather: up: up is not split over an axis of the batch (replica, fsdp), so it is not gathered"),
        (
            {"*": [None, "fsdp"]},
            {"up": "int8"},
            "gather: up: up has [16, 256] numbers in a use, split [null, fsdp]: no dim has blocks of 128 to",
        ),
        ({"*": ["fsdp", None]}, {"up": "int4"}, "signals.mlp.gather.up: the text 'int4' is not one of int8."),
    ],
)
def test_bad_rules(tmp_path, arrays, params, gather, message):
    path = tmp_path / "rules.yaml"
    path.write_text(f"inputs: [[replica, fsdp], ...]\nsignals:\n  mlp:\n    params: {yaml(params)}\n    gather: {yaml(gather)}\n")
    with pytest.raises(InputError) as raised:
        jgt.shard(mlp(), path, jgt.make_mesh({"replica": 2, "fsdp": 4})).placement(*arrays)
    assert any(problem.startswith(f"{path}:5: {message}") for problem in raised.value.problems), raised.value.problems


def yaml(mapping):
    return str(mapping).replace("None", "null").replace("'", '"')


@pytest.mark.parametrize("read", ["indexed", "looked up"])
def test_weights_that_cannot_be_gathered(arrays, read):
    def loss(params, x):
        with context("mlp"):
            if read == "indexed":
                return jnp.sum(x @ params["up"][0])
            return jnp.sum(params["up"][0].astype(x.dtype)) + jnp.sum(jnp.take(params["table"], jnp.zeros(4, int), axis=0))

    params = arrays[0] | {"table": jnp.ones((32, 256))}
    rules = RULES | {
        "default": "replicate",
        "signals": {"mlp": {"params": {"{up,table}": ["fsdp", None]}, "gather": {"{up,table}": "int8"}}},
    }
    with pytest.raises(InputError) as raised:
        jgt.shard(loss, rules, jgt.make_mesh({"replica": 2, "fsdp": 4})).placement(params, arrays[1])
    expected = "stack of layers that no scan goes over" if read == "indexed" else "table whose rows are looked up"
    assert any(expected in problem for problem in raised.value.problems), raised.value.problems
