"""Unmodified linen and nnx transformers train sharded as they train on one device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_transformers import RULES, SEQ, VOCAB, NnxTransformer, Transformer, cross_entropy

import jgt

MESH = jgt.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, SEQ))
OPTIMIZER = optax.adam(1e-2)
STEPS = 5


def train(loss, params, shardings=None):
    """The losses of five steps, and the layout of the parameters after them."""
    state = OPTIMIZER.init(params)
    if shardings is not None:
        params, state = jax.device_put((params, state), (shardings.params, shardings.optimizer(state)))

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params, TOKENS)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses, params


def linen():
    model = Transformer()
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return params, lambda params, tokens: cross_entropy(model.apply(params, tokens), tokens)


@nnx.jit
def nnx_model():
    return NnxTransformer(nnx.Rngs(0))


def nnx_split():
    graph, params = nnx.split(nnx_model())
    return params, lambda params, tokens: cross_entropy(nnx.merge(graph, params)(tokens), tokens)


MODELS = {"linen": linen, "nnx": nnx_split}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trains_as_it_does_unsharded(kind):
    params, loss = MODELS[kind]()
    rules = jgt.make_rules(RULES)
    placement = jgt.place(loss, rules, MESH, params, TOKENS)
    losses, trained = train(jgt.shard(loss, rules, MESH), params, placement)
    expected, expected_params = train(loss, params)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert expected[-1] < expected[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-3), trained, expected_params)
    jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim) or pytest.fail(f"{a.sharding} is not {s}"), trained, placement.params)
    sharded = [p.spec for p in placement.parameters if p.path.endswith(("kernel", "embedding"))]
    assert all("tensor" in spec and "fsdp" in spec for spec in sharded)


def test_an_nnx_module_itself_may_be_the_first_argument():
    model = nnx.jit(lambda: NnxTransformer(nnx.Rngs(0), layers=1))()
    loss = lambda model, tokens: cross_entropy(model(tokens), tokens)  # noqa: E731
    rules = jgt.make_rules(RULES)
    expected, expected_gradients = nnx.jit(nnx.value_and_grad(loss))(model, TOKENS)
    value, gradients = nnx.jit(nnx.value_and_grad(jgt.shard(loss, rules, MESH)))(model, TOKENS)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), gradients, expected_gradients)
    assert gradients["unembed"]["kernel"].get_value().sharding.spec == P("fsdp", "tensor")
