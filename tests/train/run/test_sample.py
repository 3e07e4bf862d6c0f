"""Sampled text, compared with a slow loop that calls the model once for each token."""

from pathlib import Path

import jax
import numpy as np
import pytest

from train.data.opening import open_data
from train.generate.generate import sample_text
from train.setup import prepare

SAMPLE = "sample={tokens: 9, prompt: '1 4 9 ', temperature: 0}"


@pytest.fixture
def sample(tiny):
    """The text of an untrained model, and its setup, state and data."""

    def _sample(*overrides):
        run = tiny(*overrides)
        setup = prepare(run)
        data = open_data(run.config.data, seq=32, vocab=256, seed=0, cache_dir=Path("unused"))
        state = setup.init()
        return sample_text(setup, state, data), setup, state, data

    return _sample


def test_without_temperature_the_likeliest_token_follows(sample):
    text, setup, state, data = sample(SAMPLE)
    tokens = data.tokenizer.encode("1 4 9 ")
    apply = jax.jit(setup.program.model.apply)
    for _ in range(9):
        padded = np.array([tokens + [0] * (32 - len(tokens))])
        tokens.append(int(np.argmax(apply(state.params, state.variables, padded)[0, len(tokens) - 1])))
    assert text == data.tokenizer.decode(tokens)


@pytest.mark.slow
def test_a_mesh_changes_nothing(sample):
    # The state of this model, a bias for each expert of each layer, has too few rows to be split like a batch.
    experts = "model={kind: llama, experts: {count: 4, choose: 2, ffn: 32}}"
    sharded = sample(SAMPLE, experts, "mesh={data: 8}", "rules={axes: {batch: [data]}, inputs: {'*': [batch, null]}, default: replicate}")
    assert sharded[0] == sample(SAMPLE, experts)[0]


def test_temperature_draws_by_the_seed(sample):
    warm = "sample={tokens: 9, prompt: '1 4 9 ', temperature: 1.5}"
    text, setup, state, data = sample(warm)
    assert sample_text(setup, state, data) == text
    assert text.startswith("1 4 9 ")
    assert text != sample(SAMPLE)[0]


def test_a_sequence_ends_the_text_and_the_end_of_a_long_prompt_counts(sample):
    text, _, _, data = sample("sample={tokens: 9, prompt: " + "a" * 20 + "b" * 30 + ", temperature: 0}")
    assert text.startswith("a" + "b" * 30)
    assert len(data.tokenizer.encode(text)) >= 32
    assert len(text) == 32


def test_a_model_may_know_more_tokens_than_the_tokenizer(sample):
    text, *_ = sample("sample={tokens: 9, prompt: '1 4 9 ', temperature: 5.0}", "model.vocab=1024")
    assert text.startswith("1 4 9 ")
    assert len(text) > 6
