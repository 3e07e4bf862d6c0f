"""Published models from their config.json alone have exactly as many parameters as published."""

import json
from pathlib import Path

import jax
import pytest
import yaml

from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.weights.described import described_by

GOLDENS = Path(__file__).parents[2] / "goldens"
MODELS = yaml.safe_load((GOLDENS / "published_models.yaml").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_that_were_published(name):
    told = MODELS[name]["config"]
    values = json.loads((GOLDENS / "configs" / told).read_text()) if isinstance(told, str) else told
    keys = described_by(values, Path("config.json")).keys
    config = bind(Node.of(dict(keys), "config.json", "model"), ModelConfig, [])
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))[0]
    assert sum(x.size for x in jax.tree.leaves(shapes)) == MODELS[name]["parameters"]
