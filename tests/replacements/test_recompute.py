"""A policy around the layers of models that know nothing of it: what they keep, and gradients that do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from strangers import LinenLlama, NnxLlama

from jgt.replacements.layers import recomputed
from train.models.config import ModelConfig
from train.models.model import of_flax

CONFIG = ModelConfig(layers=3, embed=16, heads=2, ffn=24, vocab=20, seq=8)
TOKENS = jnp.arange(16).reshape(2, 8)
MAKE = {
    "nnx": lambda rngs: NnxLlama(CONFIG, jnp.float32, rngs=rngs),
    "linen": lambda rngs: LinenLlama(CONFIG, jnp.float32),
}


def nothing(*_, **__):
    return False


def loss_of(kind):
    model = of_flax(MAKE[kind], lambda module: module(TOKENS))
    params = model.init(jax.random.key(0))[0]
    return params, lambda params, tokens: jnp.sum(jnp.sin(model.apply(params, {}, tokens)))


@pytest.mark.parametrize("kind", MAKE)
def test_layers_keep_their_input_alone_and_gradients_stay(kind):
    params, loss = loss_of(kind)
    changed = recomputed(loss, nothing, missing=ValueError())

    def kept(fn):
        """The shapes of the stacks of activations that the layers keep."""
        saved = saved_residuals(fn, params, TOKENS)
        return [x.shape for x, _ in saved if x.shape[:3] == (3, 2, 8)]

    assert len(kept(loss)) > 5
    assert kept(changed) == [(3, 2, 8, 16)]
    found, expected = (jax.grad(fn)(params, TOKENS) for fn in (changed, loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_policy_is_asked_about_the_names_in_the_layers():
    params, loss = loss_of("nnx")
    asked = set()

    def policy(primitive, *_, **more):
        asked.add(more.get("name", primitive.name))
        return False

    jax.make_jaxpr(jax.grad(recomputed(loss, policy, missing=ValueError())))(params, TOKENS)
    assert {"q", "heads", "hidden", "dot_general"} <= asked
    assert "table" not in asked and "logits" not in asked


def test_names_of_arguments_stay_and_a_call_of_the_whole_function_is_entered():
    params, loss = loss_of("linen")
    changed = recomputed(jax.jit(loss), nothing, missing=ValueError())
    np.testing.assert_allclose(changed(params, tokens=TOKENS), loss(params, TOKENS), rtol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda params, x: jnp.sum(x @ params),
        # A scan over the batch.
        lambda params, x: jax.lax.scan(lambda total, row: (total + jnp.sum(row @ params), None), 0.0, x)[0],
    ],
)
def test_without_a_scan_over_parameters_there_are_no_layers(fn):
    with pytest.raises(ValueError, match="no layers"):
        recomputed(fn, nothing, missing=ValueError("no layers"))(jnp.ones((4, 4)), jnp.ones((2, 4)))
