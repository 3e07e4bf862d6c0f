"""Published models from their config.json alone have exactly as many parameters as published."""

from pathlib import Path

import jax
import pytest
import yaml

from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.weights.described import described_by

MODELS = yaml.safe_load((Path(__file__).parents[2] / "goldens" / "published_models.yaml").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_that_were_published(name):
    keys = described_by(MODELS[name]["config"], Path("config.json")).keys
    config = bind(Node.of(dict(keys), "config.json", "model"), ModelConfig, [])
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    assert sum(x.size for x in jax.tree.leaves(shapes)) == MODELS[name]["parameters"]
