"""Tasks of lm-evaluation-harness: its own tasks, prompts and metrics, with jgt's model in the place of its own.

The harness asks three kinds of questions: how likely is a continuation after a context, how likely is a whole text, and what does the model
write after a context. How texts become tokens is the harness's code (`TemplateLM`) where it has some, and otherwise what its model `hf`
does, so that both have the same results.

Each answer is stored as soon as it is computed, in a file of the harness's own form whose name says which model it belongs to. An
evaluation that was killed is continued by the same command, and another task that asks the same question finds the answer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from jgt.document import InputError, nearest

from ..command_line import say
from ..generate.generate import Generator
from ..loaded import Loaded
from ..run.replay import digest_of_arrays
from .likelihood import Row, Scorer, prefix_of, windows

_RESAMPLES = 1_000
"""The samples from which a standard error without a formula is estimated."""
_MOST_TOKENS = 256
"""The number of tokens that a model may write where the task does not say it, as in the harness."""


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """The results of tasks, as the harness writes them, its table of them, and the file that has them."""

    values: dict[str, Any]
    table: str
    file: Path


def evaluate_tasks(
    scorer: Scorer, tasks: Sequence[str], *, out: Path, include: str | None, limit: int | None, fewshot: int | None
) -> TaskResults:
    """Evaluates a model on tasks by name. out: the folder of results and answers. include: a folder with more tasks. Raises InputError."""
    manager = TaskManager(include_path=include)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise InputError([f"command line: --tasks {task}: no such task. {nearest(task, manager.all_tasks)}" for task in unknown])
    model, identity = HarnessModel(scorer), _identity(scorer.loaded)
    out.mkdir(parents=True, exist_ok=True)
    answers = out / f"answers-{identity}"
    if stored := [file for file in out.glob(f"{answers.name}*") if file.is_file()]:
        say(f"Earlier answers are read from {stored[0]}")
    # The harness prints, and would fork this process, in which JAX has threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        values = simple_evaluate(
            model,
            tasks=manager.match_tasks(list(tasks)),
            num_fewshot=fewshot,
            limit=limit,
            use_cache=str(answers),
            bootstrap_iters=_RESAMPLES,
            task_manager=manager,
        )
    assert values is not None
    values["config"] |= {"model": "jgt", "model_args": {"identity": identity, "step": scorer.loaded.step}}
    file = out / f"results_{datetime.now().isoformat().replace(':', '-')}.json"
    file.write_text(json.dumps(values, indent=2, default=handle_non_serializable, ensure_ascii=False))
    say(f"results in {file}")
    groups = f"\n{make_table(values, 'groups')}" if values.get("groups") else ""
    return TaskResults(values=values, table=make_table(values) + groups, file=file)


class HarnessModel(TemplateLM):  # pyright: ignore[reportUntypedBaseClass]
    """A model of jgt, as the harness asks it. prefix_token_id: the context of a text that has none."""

    prefix_token_id: int = 0

    def __init__(self, scorer: Scorer):
        super().__init__()
        self._scorer, self._loaded = scorer, scorer.loaded
        tokenizer, self.max_length = scorer.loaded.tokenizer, scorer.loaded.config.seq
        if tokenizer is None or not prefix_of(tokenizer):
            lacks = "no tokenizer" if tokenizer is None else "a tokenizer without a token that begins or ends a text"
            raise InputError([f"command line: --tasks: the model has {lacks}, which the tasks need"])
        self._tokenizer = tokenizer
        (self.prefix_token_id,) = prefix_of(tokenizer)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self._tokenizer.special.end_of_text
        return self.prefix_token_id if end is None else end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, after those that the tokenizer adds to it unless it begins with them."""
        adds = not string.startswith(self._tokenizer.decode([self.prefix_token_id])) if add_special_tokens is None else add_special_tokens
        return [*(self._tokenizer.special.beginning if adds else ()), *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = list[Row]()
        for (_, continuation), context, tokens in requests:
            if len(tokens) > self.max_length:
                why = f"has {len(tokens)} tokens, more than the model's sequence length {self.max_length}"
                raise InputError([f"a task's continuation {continuation[:40]!r} {why}"])
            kept = (context + tokens)[-self.max_length - 1 :]
            rows.append(Row(tokens=kept, first=len(kept) - len(tokens)))
        answers = dict[int, tuple[float, bool]]()
        for index, score in self._scorer.scores(rows, what="continuations"):
            answers[index] = (-score.nats, score.is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
        return [answers[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that score each token once."""
        texts: list[str] = [request.args[0] for request in requests]
        rows = [
            list(windows([self.prefix_token_id, *self.tok_encode(text)], seq=self.max_length, stride=self.max_length)) for text in texts
        ]
        found = [0.0] * len(texts)
        for index, nats in self._scorer.sums(rows, what="windows"):
            found[index] = -nats
            self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), -nats)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that the model writes after each context, up to a stop string."""
        found, alike = [""] * len(requests), dict[str, list[int]]()
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for some in alike.values():
            settings = _settings(requests[some[0]].args[1])
            room = self.max_length - settings["tokens"]
            if room < 1:
                why = f"lets the model write {settings['tokens']} tokens, and model.seq {self.max_length} leaves no room for the question"
                raise InputError([f"command line: --tasks: a task {why}"])
            prompts = [self.tok_encode(requests[index].args[0])[-room:] for index in some]
            for piece in self._generator.pieces(prompts, batch=self._scorer.rows, **settings):
                if piece.answer.reason:
                    index = some[piece.answer.number[0]]
                    found[index] = piece.answer.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, found[index])
        return found

    @functools.cached_property
    def _generator(self) -> Generator:
        loaded = self._loaded
        return Generator(loaded.setup, loaded.params, loaded.variables, self._tokenizer, ends=(self.eot_token_id,))


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """A task's `generation_kwargs` as keys of `generate:`. Raises InputError for one that jgt does not have."""
    kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(given), _MOST_TOKENS)}
    tokens, stop, is_drawn = kwargs.pop("max_gen_toks"), kwargs.pop("until"), kwargs.pop("do_sample")
    drawing = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if unknown := kwargs.keys() - drawing.keys():
        raise InputError([f"command line: --tasks: a task's generation_kwargs: {sorted(unknown)[0]}: jgt has only {', '.join(drawing)}"])
    drawing |= kwargs | ({} if is_drawn else {"temperature": 0.0})
    return {"tokens": tokens, "stop": tuple(stop), "samples": 1, **drawing}


def _identity(loaded: Loaded) -> str:
    """A name for a model's function from texts to logits: its arrays, its section and its tokenizer, whatever the layout."""
    checksum = int(digest_of_arrays((loaded.params, loaded.variables)))
    tokenizer = None if loaded.tokenizer is None else loaded.tokenizer.identity
    section = {key: value for key, value in asdict(loaded.config).items() if key != "hf"}
    return hashlib.sha256(json.dumps([checksum, section, tokenizer], sort_keys=True, default=str).encode()).hexdigest()[:16]
