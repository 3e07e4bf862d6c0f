"""Scores of rows, windows and the losses of texts, against lm_eval's own model `hf` and against sums written out."""

import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from local_tasks import ANSWERS, write_model

import jgt
from jgt.__main__ import main
from jgt.document import InputError
from train.data.tokenizer import open_tokenizer
from train.evaluate.likelihood import Row, Scorer, prefix_of, windows
from train.evaluate.text import evaluate_texts

BEGIN = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture(scope="module")
def answers():
    return json.loads(ANSWERS.read_text())


@pytest.fixture(scope="module")
def loaded(folder):
    return jgt.load(folder)


def scored(scorer, rows):
    return [score for _, score in sorted(scorer.scores(rows))]


@pytest.mark.parametrize(
    "layout",
    [pytest.param({}, marks=pytest.mark.slow), {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rules": "jgt:fsdp_tensor"}],
    ids=["alone", "2x2x2"],
)
def test_continuations_have_the_likelihood_that_hf_gives_them(folder, answers, layout):
    scorer = Scorer(jgt.load(folder, **layout), rows=9)
    pairs = [(context, continuation) for context, continuation, *_ in answers["choices"]]
    encode = scorer.loaded.tokenizer.encode
    rows = [Row(tokens=[BEGIN, *encode(text), *encode(more)], first=1 + len(encode(text))) for text, more in pairs]
    for score, (_, _, expected, is_greedy) in zip(scored(scorer, rows), answers["choices"], strict=True):
        assert score.nats == pytest.approx(-expected, abs=1e-3)
        assert score.is_greedy == is_greedy


def test_greedy_is_what_the_model_would_choose(loaded):
    tokens = [BEGIN, 5, 9]
    tokens.append(int(jnp.argmax(loaded.logits([tokens])[0, -1])))
    wrong = [*tokens[:-1], (tokens[-1] + 1) % 64]
    likely, unlikely = scored(Scorer(loaded), [Row(tokens=tokens, first=3), Row(tokens=wrong, first=3)])
    assert likely.is_greedy and not unlikely.is_greedy
    assert likely.nats < unlikely.nats


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 10, 30])
def test_windows_score_each_token_once_and_have_all_context_that_fits(count, stride):
    tokens, seq = list(range(count)), 8
    found = list(windows(tokens, seq=seq, stride=stride))
    assert [token for row in found for token in row.tokens[row.first :]] == tokens[1:]
    for number, row in enumerate(found):
        assert len(row.tokens) == min(seq + 1, row.tokens[-1] + 1)
        is_last = row is found[-1]
        assert len(row.tokens) - row.first == (min(seq, count - 1) if number == 0 else stride) or is_last


def test_a_text_longer_than_the_model_has_the_loss_that_hf_gives_it(loaded, answers):
    scorer = Scorer(loaded, rows=4)
    texts = [text for text, _ in answers["texts"]]
    # The harness's model writes <s> before each text, after the <s> that is the context of each.
    rows = [list(windows([BEGIN, BEGIN, *scorer.loaded.tokenizer.encode(text)], seq=256, stride=256)) for text in texts]
    assert max(map(len, rows)) == 3
    for some, (_, expected) in zip(rows, answers["texts"], strict=True):
        assert sum(score.nats for score in scored(scorer, some)) == pytest.approx(-expected, rel=1e-5)


def test_losses_of_texts_are_sums_over_their_tokens(folder, tmp_path):
    loaded = jgt.load(folder, ["model.seq=24"])
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdef ", k=count)) for count in (5, 40, 23, 60)]
    (tmp_path / "plain.txt").write_text(texts[0])
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[1:]))
    paths = [str(tmp_path / name) for name in ("plain.txt", "lines.jsonl")]
    stride = 5
    plain, lines, both = evaluate_texts(Scorer(loaded, rows=3), paths, field="body", stride=stride)
    rows, nats = [], []
    for text in texts:
        tokens = [BEGIN, *loaded.tokenizer.encode(text)]
        for end in range(1, len(tokens)):
            # The first window has 24 tokens; those after it end 5 tokens apart, and the last one at the end.
            last = min(24 if end <= 24 else 24 + math.ceil((end - 24) / stride) * stride, len(tokens) - 1)
            context = tokens[max(last - 24, 0) : end]
            rows.append([*context, *[0] * (24 - len(context))])
            nats.append((len(context) - 1, tokens[end]))
    log = np.asarray(jax.nn.log_softmax(loaded.logits(rows)))
    nats = [-float(log[row, at, token]) for row, (at, token) in enumerate(nats)]
    assert (plain.documents, plain.tokens, plain.size) == (1, 5, 5)
    assert (lines.documents, lines.tokens, lines.size) == (3, 123, 123)
    assert plain.nats == pytest.approx(sum(nats[:5]), rel=1e-5) and lines.nats == pytest.approx(sum(nats[5:]), rel=1e-5)
    assert both.name == "all" and both.tokens == 128
    loss = sum(nats) / 128
    assert both.measures() == pytest.approx({"loss": loss, "perplexity": np.exp(loss), "bits_per_byte": loss / np.log(2)}, rel=1e-5)


def test_texts_that_cannot_be_read_are_named_together(loaded, tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"body": "abc"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    scorer = Scorer(loaded)
    with pytest.raises(InputError) as raised:
        evaluate_texts(scorer, [str(tmp_path / name) for name in ("none.txt", "lines.jsonl", "bad.jsonl")], field="text", stride=None)
    text = str(raised.value)
    assert "none.txt: no such file" in text and "Add --field body" in text and "must be text, not the whole number 3" in text
    with pytest.raises(InputError, match=r"--stride 300: must be from 1 to the model's sequence length 256"):
        evaluate_texts(scorer, [str(tmp_path / "lines.jsonl")], field="body", stride=300)


@pytest.mark.parametrize(("named", "first"), [({"bos_token": "<s>"}, 1), ({"bos_token": None}, 2), ({"bos_token": "<gone>"}, 2)])
def test_a_text_begins_as_in_lm_eval_after_the_token_that_the_folder_names(named, first, tmp_path):
    folder = write_model(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **named}))
    opened = open_tokenizer(str(folder / "tokenizer.json"))
    assert opened.special.beginning == () and prefix_of(opened) == (first,)


@pytest.mark.parametrize("tokens", [[[3, 9999]], [[3, 64]], [[-1, 3]], [[1.5, 2.0]], [[2**40, 1]]], ids=str)
def test_logits_of_tokens_that_the_model_does_not_have_are_refused(loaded, tokens):
    with pytest.raises(ValueError, match=r"Pass whole numbers from 0 to 63, below model.vocab 64"):
        loaded.logits(tokens)


def test_words_with_an_equals_sign_behind_files_are_overrides_and_json_is_json(folder, tmp_path, capsys):
    (tmp_path / "some.txt").write_text("abc def")
    (tmp_path / "a=b").write_text("")
    texts = [str(tmp_path / "some.txt"), str(tmp_path / "a=b")]
    assert main(["eval", str(folder), "--json", "--text", *texts, "model.seq=24"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["text"]
    assert [one["name"] for one in found] == [*texts, "all"] and found[0]["tokens"] == 7
    assert found[1]["loss"] is None and found[2]["loss"] == found[0]["loss"]


def test_a_prompt_that_is_refused_is_not_printed(folder, tmp_path, capsys):
    bare = write_model(tmp_path / "model")
    (bare / "tokenizer.json").unlink()
    assert main(["generate", str(bare), "--prompt", "hello"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "the model has no tokenizer, so a prompt must be a list of tokens. Add a tokenizer.json" in err
    assert main(["generate", str(folder), "--prompt", "abc", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("abc")
