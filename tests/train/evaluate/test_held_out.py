"""`jgt eval` of a run: the losses of its training, bit for bit, and what the command says about wrong input."""

import json
import re

import pytest

from jgt.__main__ import main
from train.journal.rows import read_metrics
from train.run.train import train

LAYOUTS = {
    "one device": [],
    "2 x 2 x 2": ["mesh={data: 2, fsdp: 2, tensor: 2}", "rules=jgt:fsdp_tensor"],
    # An average has parameters of its own to evaluate.
    "an average": ["mesh={data: 2, fsdp: 2, tensor: 2}", "rules=jgt:fsdp_tensor", "train.ema=0.5"],
    "a pipeline": ["mesh={data: 2, fsdp: 1, stage: 2, tensor: 2}", "rules=jgt:pipeline", "pipeline={signal: layers, microbatches: 2}"],
}


def evaluated(capsys, *arguments):
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("layout", [name if name == "one device" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_the_losses_are_those_of_training(layout, tiny, text_file, tmp_path, capsys):
    parts = [{"source": "text", "path": str(text_file), "weight": 1, "name": name} for name in ("some", "other")]
    data = [f"data={json.dumps({'source': 'mixture', 'mixture': parts, 'eval_tokens': 1500})}"]
    train(tiny(*data, *LAYOUTS[layout], "train.steps=3", "train.batch=8", "train.eval_batches=3"))
    *_, row = read_metrics(tmp_path / "run" / "metrics.jsonl")
    expected = {key: value for key, value in row.items() if key.startswith("eval_loss")}
    assert len(expected) == 3
    result = evaluated(capsys, tmp_path / "run")
    assert result == {"model": str(tmp_path / "run"), "step": 3, "loss": "nats per token", "held_out": expected}


@pytest.mark.slow
def test_a_run_evaluates_texts_by_its_rules_and_on_other_meshes(tiny, text_file, tmp_path, capsys):
    train(tiny("data.eval_tokens=0", *LAYOUTS["2 x 2 x 2"], "train.steps=2", "train.batch=8"))
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text()[:200])
    own = evaluated(capsys, tmp_path / "run", "--text", text, "--batch", "2")["text"]
    other = evaluated(capsys, tmp_path / "run", "--text", text, "--mesh", "data=8", "--rules", "jgt:replicated")["text"]
    assert own[0].pop("name") == other[0].pop("name") == str(text)
    assert own[0] == pytest.approx(other[0], rel=1e-5) and own[0]["bytes"] == own[0]["tokens"] == 200
    assert main(["eval", str(tmp_path / "run"), "--text", str(text)]) == 0
    assert "perplexity" in (table := capsys.readouterr().out) and f"{own[0]['loss']:.4f}" in table
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "data: holds nothing out to evaluate on. Name texts with --text FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "fsdp"], "--mesh fsdp: must be sizes by axis, such as fsdp=4,tensor=2"),
        (["--tasks", "a", "--include", "nowhere"], "no such folder|pip install 'jgt\\[eval\\]'"),
        ([], "there is no config.yaml|config.yaml, and no folder of Hugging Face"),
    ],
)
def test_wrong_input_is_named(arguments, message, tmp_path, capsys):
    assert main(["eval", str(tmp_path), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
