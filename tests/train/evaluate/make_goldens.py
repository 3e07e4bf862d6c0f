"""Makes tests/goldens/evaluate.json: what lm_eval's own model `hf` answers to the local tasks.

pip install 'lm_eval==0.4.13' 'torch==2.13.0' transformers && python tests/train/evaluate/make_goldens.py
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "helpers"))

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from local_tasks import ANSWERS, write_model, write_tasks

KINDS = {"choices": "local_choice", "texts": "local_rolling", "written": "local_writing"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, tasks = write_model(Path(folder) / "model"), write_tasks(Path(folder) / "tasks")
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        arguments = {"pretrained": str(model), "dtype": "float32"}
        how = {"batch_size": 4, "device": "cpu", "task_manager": manager}
        found = simple_evaluate("hf", arguments, tasks=list(KINDS.values()), **how)
        chatted = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 2}
        chats = simple_evaluate("hf", arguments, tasks=["local_choice"], **how, **chatted)
    answers = {
        kind: [
            [*question[:1], *(question[1:] if kind == "choices" else []), *(answer if isinstance(answer, list | tuple) else [answer])]
            for sample in found["samples"][task]
            for question, (answer,) in zip(sample["arguments"], sample["resps"], strict=True)
        ]
        for kind, task in KINDS.items()
    }
    metrics = {task: floats(found, task) for task in KINDS.values()}
    # A line for each answer.
    lists = [f" {json.dumps(kind)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for kind, rows in answers.items()]
    chat = [f' "chat": {json.dumps(floats(chats, "local_choice"))}']
    ANSWERS.write_text("{\n" + ",\n".join([f' "results": {json.dumps(metrics)}', *chat, *lists]) + "\n}\n")


def floats(found, task):
    return {name: value for name, value in found["results"][task].items() if isinstance(value, float) and "stderr" not in name}


if __name__ == "__main__":
    main()
