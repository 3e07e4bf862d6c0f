"""FLOPs per token, compared with a count by hand, matmul by matmul."""

import jax
import pytest

from train.models.config import GPTConfig, ModelConfig
from train.models.decoder import build
from train.records.progress import peak_flops

LAYERS, EMBED, HEADS, KV, FFN, VOCAB, SEQ = 3, 8, 4, 2, 12, 40, 16
SIZE = EMBED // HEADS
# Multiply and add, forward once and backward twice.
MATMUL = 2 * 3


def num_parameters(config):
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(build(config).init, jax.random.key(0))))


def attention():
    """The scores and their product with the values, for the half of the positions that a token sees on average."""
    return MATMUL * LAYERS * 2 * HEADS * SIZE * SEQ / 2


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    config = ModelConfig(layers=LAYERS, embed=EMBED, heads=HEADS, kv_heads=KV, ffn=FFN, vocab=VOCAB, seq=SEQ, tied=tied)
    projections = 2 * EMBED * HEADS * SIZE + 2 * EMBED * KV * SIZE
    norms = LAYERS * 2 * EMBED + EMBED
    expected = MATMUL * (LAYERS * (projections + 3 * EMBED * FFN) + norms + VOCAB * EMBED) + attention()
    assert config.flops_per_token(num_parameters(config)) == expected


def test_gpt_looks_positions_up():
    config = GPTConfig(layers=LAYERS, embed=EMBED, heads=HEADS, ffn=FFN, vocab=VOCAB, seq=SEQ)
    projections = 4 * EMBED * EMBED + 4 * EMBED
    mlp = 2 * EMBED * FFN + FFN + EMBED
    norms = LAYERS * 2 * 2 * EMBED + 2 * EMBED
    expected = MATMUL * (LAYERS * (projections + mlp) + norms + VOCAB * EMBED) + attention()
    assert config.flops_per_token(num_parameters(config)) == expected


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA GB200", 2500e12), ("cpu", None)],
)
def test_peak_of_a_device(kind, peak):
    assert peak_flops(kind) == peak


def test_frozen_matrices_have_no_gradient():
    config = ModelConfig(layers=LAYERS, embed=EMBED, heads=HEADS, ffn=FFN, vocab=VOCAB, seq=SEQ)
    number, trained = num_parameters(config), 7
    multiplied = number - VOCAB * EMBED
    assert config.flops_per_token(number, number - trained) == 4 * (multiplied - trained) + MATMUL * trained + attention()
