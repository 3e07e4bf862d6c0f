"""`jgt check --show-data`: the windows that a run trains on, token by token."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import jgt
from jgt.command.commands import main
from train.config import load
from train.data.tokenizer import open_tokenizer
from train.records.windows import data_windows
from train.run.opened import opened_data

TOKENIZER = Path(__file__).parents[2] / "goldens" / "tokenizers" / "metaspace" / "tokenizer.json"
TEXTS = ("On\x1b", "The rules say what happens")


@pytest.fixture
def documents(tmp_path):
    """The config of a run on two documents, one of which has a control character."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(TOKENIZER), "eval_tokens": 0, "shuffle": False}
    return {"run": {"dir": str(tmp_path / "run")}, "model": {"vocab": 400, "seq": 8}, "data": {**data, "documents": "mask"}}


def windows_of(run, count, part):
    return data_windows(run, opened_data(run), count, part)


def test_windows_are_tokens_with_text_weight_and_document(documents):
    first, second = windows_of(load(documents), 2, None)
    tokenizer = open_tokenizer(str(TOKENIZER))
    ids = [token for text in TEXTS for token in (1, *tokenizer.encode(text), 2)]
    assert [row["token"] for row in first] == ids[:9] and [row["token"] for row in second] == ids[8:17]
    assert [row["position"] for row in first] == list(range(9))
    assert [row["text"] for row in first[:7]] == ["<s>", " ", "O", "n", "\x1b", "</s>", "<s>"]
    # Nothing predicts the first token, and an end predicts no beginning.
    assert [row["weight"] for row in first] == [None, 1, 1, 1, 1, 1, 0, 1, 1]
    assert [row["document"] for row in first] == [1] * 6 + [2] * 3
    assert {row["document"] for row in second} == {1}


def test_the_command_prints_no_control_character(documents, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps(documents))
    assert main(["check", str(tmp_path / "run.yaml"), "--show-data", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("Window") == 2 and "'\\x1b'" in out and out.replace("\n", "").isprintable()
    assert re.search(r"^0 +1 +'<s>' +1$", out, re.MULTILINE)
    assert main(["check", str(tmp_path / "run.yaml"), "--json", "--show-data"]) == 0
    (window,) = json.loads(capsys.readouterr().out)["windows"]
    assert window[1] == {"position": 1, "token": 298, "text": " ", "weight": 1.0, "document": 1}


def test_windows_of_held_out_parts(documents, tmp_path, capsys):
    (tmp_path / "b.txt").write_text("held out text that is long enough")
    parts = [{"source": "text", "path": str(tmp_path / "b.txt"), "weight": 1, "name": name} for name in ("first", "second")]
    documents["data"], documents["model"] = {"source": "mixture", "mixture": parts}, {"seq": 4}
    run = load(documents)
    assert len(list(windows_of(run, 9, ""))) == 2 * len(list(windows_of(run, 9, "second"))) > 0
    with pytest.raises(jgt.InputError, match=r"command line: --eval 'third': no data of this name is held out\. Known: first, second"):
        next(windows_of(run, 1, "third"))
    (tmp_path / "run.yaml").write_text(json.dumps(documents))
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "run.yaml"), "--eval"])
    assert ended.value.code == 2 and "Add --show-data" in capsys.readouterr().err


def test_ids_that_nobody_encoded_here_have_no_text(documents, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    documents["data"] = {"source": "tokens", "path": str(tmp_path / "a.npy"), "eval_tokens": 0, "shuffle": False}
    (window,) = windows_of(load(documents), 1, None)
    assert window[:2] == [{"position": 0, "token": 0, "weight": None}, {"position": 1, "token": 1, "weight": 1.0}]


def test_samples_of_the_users_own(documents, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def pairs():\n    return [{'x': np.full((2, 8), i, np.float32), 'y': np.int32(i)} for i in range(4)]\n"
        "def loss(model, batch):\n    return 0.0\n"
    )
    documents["data"], documents["train"] = {"source": "mine:pairs", "shuffle": False}, {"loss": "mine:loss"}
    windows = list(windows_of(load(documents, code=[tmp_path / "mine.py"]), 2, None))
    assert windows[1] == [
        {"array": "x", "shape": [2, 8], "type": "float32", "begins": [1.0] * 8},
        {"array": "y", "shape": [], "type": "int32", "begins": [1]},
    ]
