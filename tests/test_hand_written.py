"""The rewriter loses nothing: the compiled step has the same collectives as the same llama with hand-written constraints."""

import jax
import numpy as np
import pytest

from benchmarks.harness import ROOT
from benchmarks.measure import Bench, collectives

TINY = ["model.layers=2", "model.embed=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128", "model.vocab=512", "model.seq=32"]


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_same_collectives_and_losses(remat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = Bench(str(ROOT / "benchmarks/step.yaml"), [*TINY, f"train.remat={remat}", "devices.virtual_cpu=null"])
    (ours, our_state), (by_hand, hand_state) = bench.ready("jgt"), bench.ready("by_hand")
    assert collectives(ours.as_text()) == collectives(by_hand.as_text())
    losses, settings = [], bench.setup.settings(1)
    for _, batch in zip(range(3), bench.batches, strict=False):
        our_state, found = ours(our_state, batch, settings)
        hand_state, expected = by_hand(hand_state, batch, settings)
        losses.append((float(found["loss"]), float(expected["loss"])))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=0, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), our_state.params, hand_state.params)
