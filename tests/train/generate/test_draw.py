"""Draws: their distribution against probabilities from numpy, and what they depend on."""

import jax
import numpy as np
import pytest

from train.generate.draw import DrawSettings, draw

VOCAB, DRAWS = 12, 6000
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
NONE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0, "seed": 3, "is_live": True}
TYPES = {"top_k": np.int32, "seed": np.uint32, "is_live": bool}


def settings(rows, **changes):
    arrays = {name: np.full(rows, value, TYPES.get(name, np.float32)) for name, value in {**NONE, **changes}.items() if name != "number"}
    return DrawSettings(**arrays, number=np.arange(rows, dtype=np.uint32))


def drawn(given, used=(), known=VOCAB, positions=7):
    rows = len(given.number)
    is_used = np.zeros((rows, VOCAB), bool)
    is_used[:, list(used)] = True
    return jax.jit(draw, static_argnums=4)(np.tile(LOGITS, (rows, 1)), is_used, np.full(rows, positions, np.int32), given, known)


def probabilities(*, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, known=VOCAB):
    logits = np.where(np.arange(VOCAB) < known, LOGITS.astype(np.float64), -np.inf) / temperature
    p = np.exp(logits - logits.max())
    order = np.argsort(-p)
    p[order[top_k or VOCAB :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
        {"known": 9},
    ],
    ids=str,
)
def test_draws_have_the_distribution_of_their_settings(given):
    known = given.get("known", VOCAB)
    tokens, _ = drawn(settings(DRAWS, **{name: value for name, value in given.items() if name != "known"}), known=known)
    counts, expected = np.bincount(tokens, minlength=VOCAB), DRAWS * probabilities(**given)
    assert np.all(counts[expected == 0] == 0)
    chi = np.sum((counts - expected)[expected > 0] ** 2 / expected[expected > 0])
    # Of 11 degrees of freedom, chi-square is above 36 once in 6000 cases.
    assert chi < 36


def test_without_temperature_the_likeliest_token_is_drawn_and_a_penalty_changes_it():
    best = int(np.argmax(LOGITS))
    tokens, logs = drawn(settings(2, temperature=0.0))
    assert tokens.tolist() == [best, best]
    np.testing.assert_allclose(logs, np.log(probabilities()[best]), rtol=1e-5)
    assert drawn(settings(2, temperature=0.0, penalty=100.0), used=[best])[0].tolist() == [int(np.argsort(-LOGITS)[1])] * 2


def test_a_draw_depends_on_seed_number_and_position_alone():
    given = settings(50)
    tokens, _ = drawn(given)
    few, _ = drawn(DrawSettings(*(x[20:23] for x in given)))
    assert few.tolist() == tokens[20:23].tolist()
    assert drawn(given, positions=8)[0].tolist() != tokens.tolist()
    assert drawn(settings(50, seed=4))[0].tolist() != tokens.tolist()


def test_rows_of_one_batch_have_settings_of_their_own():
    given = settings(400)._replace(top_k=np.repeat([1, 3], 200).astype(np.int32))
    tokens, _ = drawn(given)
    order = np.argsort(-LOGITS)
    assert set(tokens[:200].tolist()) == {int(order[0])}
    assert set(tokens[200:].tolist()) == set(order[:3].tolist())
