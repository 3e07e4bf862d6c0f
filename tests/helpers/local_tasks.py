"""A tiny published model with a tokenizer of its 64 characters, and three tasks of lm-evaluation-harness that need no network."""

import json
import random
import shutil
import string
from pathlib import Path

import yaml

GOLDENS = Path(__file__).parents[1] / "goldens"
SPECIAL = ("<pad>", "<s>", "</s>")
LETTERS = f"{string.ascii_lowercase} {string.digits}{string.ascii_uppercase[:24]}"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
ANSWERS = GOLDENS / "evaluate.json"
"""What lm_eval's own model `hf` answers: results by task, and each question with its answer. `make_goldens.py` beside the tests made it."""


def write_model(folder: Path, model: str = "llama3") -> Path:
    """A folder with the golden model and a tokenizer that begins each text with <s>."""
    shutil.copytree(GOLDENS / "weights" / model, folder)
    vocab = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    added = [{"id": vocab[t], "content": t, "special": True, "normalized": False} for t in SPECIAL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    described = {
        "version": "1.0",
        "added_tokens": [{**token, **flags} for token in added],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {"type": "Fuse"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def write_tasks(folder: Path) -> Path:
    """A folder with the tasks local_choice, local_rolling and local_writing, and their documents."""
    folder.mkdir()
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return "".join(draw.choices(LETTERS, k=draw.randint(low, high))).strip() or "a"

    documents = {
        "local_choice": [
            {"question": words(1, 40), "choices": [words(1, 9) for _ in range(3)], "answer": draw.randrange(3)} for _ in range(40)
        ],
        # The model's sequences have 256 tokens.
        "local_rolling": [{"text": words(1, 700)} for _ in range(12)],
        "local_writing": [{"text": words(1, 60), "answer": words(1, 3)} for _ in range(12)],
    }
    configs = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}} is",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        "local_writing": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["k", "TT"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, config in configs.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **config, "metadata": {"version": 1}}))
    return folder
