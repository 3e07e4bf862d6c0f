"""The tiny models of tests/goldens/weights, which tests/train/weights/make_goldens.py makes."""

from functools import cache
from pathlib import Path

import jax
import numpy as np

from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.step.trained import merged
from train.weights.described import published
from train.weights.load import open_files

GOLDENS = Path(__file__).parents[1] / "goldens" / "weights"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())


def config_of(name, **changes):
    """The model of a golden folder, with other values of some keys."""
    problems = []
    config = bind(Node.of({**published(GOLDENS / name).keys, "seq": 96, **changes}, name, "model"), ModelConfig, problems)
    assert not problems
    return config


@cache
def expected(name):
    """tokens [2, 96], logits at each fifth of them, and their standard deviation."""
    with np.load(GOLDENS / name / "expected.npz") as file:
        return file["tokens"], file["logits"], float(file["std"])


def variables_of(name, config):
    """The variables of a golden model: those of its files, and zeros."""
    shapes, variables = jax.eval_shape(build(config).init, jax.random.key(0))
    zeros = jax.tree.map(jax.numpy.zeros_like, variables)
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), variables)
    return merged(zeros, open_files(published(GOLDENS / name), config, shapes).variables(variables, here))


def loaded(name, config, shardings=None):
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = shardings or jax.tree.map(lambda _: here, shapes)
    return open_files(published(GOLDENS / name), config, shapes).load(shapes, shardings)


def rounded(params):
    """The parameters with relative changes of 6e-8, as of roundings."""
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: (np.asarray(x) * (1 + 6e-8 * draw.standard_normal(x.shape))).astype(np.float32), params)


@cache
def tolerance(name):
    """The largest error of logits in their standard deviations: three times what roundings of the weights make, where these grow."""
    config = config_of(name)
    if config.linear is None:
        return 5e-5
    params, variables, (tokens, _, std) = loaded(name, config), variables_of(name, config), expected(name)
    apply = jax.jit(build(config).apply)
    change = np.abs(np.asarray(apply(rounded(params), variables, tokens)) - apply(params, variables, tokens)).max() / std
    return max(5e-5, 3 * float(change))
