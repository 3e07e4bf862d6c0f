"""Tasks of lm-evaluation-harness: its own tasks, prompts and metrics, with jgt's model in the place of its own.

The harness asks three kinds of questions: how likely is a continuation after a context, how likely is a whole text, and what does the model
write after a context. How texts become tokens is the harness's code (`TemplateLM`) where it has some, and otherwise what its model `hf`
does, so that both have the same results.

Each answer is stored as soon as it is computed, in a file whose name says which model it belongs to (`answers.py`; the harness's own files
are pickles). An evaluation that was killed is continued by the same command, and another task that asks the same question finds the answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from jgt.document import InputError, nearest

from ..files.streams import say
from ..generate.chat import Chat
from ..generate.generate import Generator
from ..generate.loaded import Loaded
from ..settings.sampling import EvalConfig
from ..setup import Setup
from ..step.state import State
from .answers import StoredAnswers
from .likelihood import Row, Scorer, prefix_of, windows

_RESAMPLES = 1_000
"""The samples from which a standard error without a formula is estimated."""
_MOST_TOKENS = 256
"""The number of tokens that a model may write where the task does not say it, as in the harness."""


class Tasks:
    """Tasks by name, opened. config: its `tasks` are the names. Raises InputError, of `where(key)`, for a name that no task has."""

    def __init__(self, config: EvalConfig, where: Callable[[str], str]):
        # Its warnings are about what tasks leave to its defaults.
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._config, self._manager = config, TaskManager(include_path=config.include)
        if unknown := [task for task in config.tasks if not self._manager.match_tasks([task])]:
            known = self._manager.all_tasks
            raise InputError([f"{where('tasks')} {task}: no such task. {nearest(task, known)}" for task in unknown])

    def results(self, model: HarnessModel) -> dict[str, Any]:
        """The results as the harness has them."""
        # The harness prints, and would fork this process, in which JAX has threads.
        os.environ["DISABLE_MULTIPROC"] = "1"
        with contextlib.redirect_stdout(sys.stderr):
            values = simple_evaluate(
                model,
                tasks=self._manager.match_tasks([*self._config.tasks]),
                num_fewshot=self._config.fewshot,
                limit=self._config.limit,
                bootstrap_iters=_RESAMPLES,
                apply_chat_template=self._config.chat,
                fewshot_as_multiturn=self._config.chat,
                task_manager=self._manager,
            )
        assert values is not None
        return values


def evaluate_tasks(scorer: Scorer, config: EvalConfig, *, out: Path, identity: str) -> dict[str, Any]:
    """The results of `jgt eval`, as the harness has them. They are written into the folder `out`, and so are the answers.

    identity: a name of the model that `scorer` has. Its answers are found again by it. Raises InputError.
    """
    tasks = Tasks(config, lambda key: f"command line: --{key}")
    out.mkdir(parents=True, exist_ok=True)
    answers = StoredAnswers(file := out / f"answers-{identity}.jsonl", identity)
    if len(answers):
        say(f"Earlier answers are read from {file}")
    results = tasks.results(HarnessModel(scorer, "command line: --tasks:", answers, chats=config.chat))
    results["config"] |= {"model": "jgt", "model_args": {"identity": identity, "step": scorer.loaded.step}}
    file = out / f"results_{datetime.now().isoformat().replace(':', '-')}.json"
    file.write_text(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
    say(f"results in {file}")
    return results


def table_of(results: Mapping[str, object]) -> str:
    """The harness's table of results."""
    return make_table(results) + (f"\n{make_table(results, 'groups')}" if results.get("groups") else "")


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of results, such as `eval_acc/hellaswag`. A filter of answers is a part of the metric's name."""
    found = dict[str, float]()
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, of = key.partition(",")
            if isinstance(value, int | float) and of and not metric.endswith("_stderr"):
                found[f"eval_{metric}{'' if of == 'none' else f'.{of}'}/{task}"] = float(value)
    return found


class TasksOfRun:
    """The tasks of `eval:` on the model that a run has at a step. Its programs are compiled once."""

    def __init__(self, setup: Setup, tokenizer_name: str | None):
        self._setup, config = setup, setup.run.config.eval

        def where(key: str) -> str:
            return f"{setup.run.where(f'eval.{key}')}: eval.{key}:"

        self._tasks = Tasks(config, where)
        nothing = Loaded(setup=setup, params=None, variables=None, step=0, tokenizer_name=tokenizer_name)
        self._model = HarnessModel(Scorer(nothing, config.batch), where("tasks"), gathers=True, chats=config.chat)

    def metrics(self, state: State, step: int) -> dict[str, float]:
        """The metrics of a state by name."""
        params, variables = self._setup.model_params(self._setup.eval_params(state)), self._setup.eval_variables(state)
        self._model.use(params, variables, step)
        try:
            return metrics_of(self._tasks.results(self._model))
        finally:
            # In a pipeline these arrays are copies, and the next step may need their memory.
            self._model.use(None, None, step)


class HarnessModel(TemplateLM):  # pyright: ignore[reportUntypedBaseClass]
    """A model of jgt, as the harness asks it. prefix_token_id: the context of a text that has none.

    where: what an error is about. answers: the stored ones. gathers: see `Generator`. chats: whether tasks use the chat template.
    """

    prefix_token_id: int = 0

    def __init__(self, scorer: Scorer, where: str, answers: StoredAnswers | None = None, *, gathers: bool = False, chats: bool = False):
        super().__init__()
        self._scorer, self._where, self._gathers, self._texts = scorer, where, gathers, None
        self._answers = StoredAnswers() if answers is None else answers
        tokenizer, self.max_length = scorer.loaded.tokenizer, scorer.loaded.config.seq
        if tokenizer is None or not prefix_of(tokenizer):
            lacks = "no tokenizer" if tokenizer is None else "a tokenizer without a token that begins or ends a text"
            raise InputError([f"{where} the model has {lacks}, which tasks need"])
        self._tokenizer = tokenizer
        (self.prefix_token_id,) = prefix_of(tokenizer)
        self._template = Chat.of(tokenizer, scorer.loaded.setup.run.config.data).template if chats else None
        if chats and self._template is None:
            raise InputError([f"{where} the model has no chat template beside its tokenizer. Evaluate it without chat"])

    def use(self, params: Any, variables: Any, step: int) -> None:
        """Has the programs compute with other arrays from now on."""
        self._scorer = self._scorer.of(replace(self._scorer.loaded, params=params, variables=variables, step=step))
        self._texts = None if self._texts is None else self._texts.of(params, variables)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self._tokenizer.special.end_of_text
        return self.prefix_token_id if end is None else end

    @property
    def tokenizer_name(self) -> str:
        """A name of the tokenizer and its template, by which the harness stores requests."""
        return self._tokenizer.identity

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's program, which the harness writes into its results."""
        return "" if self._template is None else self._template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of messages, up to where an answer begins or, without its prompt, up to the end of the last message."""
        assert self._template is not None
        text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The tokens of a text, after those that the tokenizer adds to it unless it begins with them."""
        adds = not string.startswith(self._tokenizer.decode([self.prefix_token_id])) if add_special_tokens is None else add_special_tokens
        return [*(self._tokenizer.special.beginning if adds else ()), *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        rows, answers, missing = list[Row](), self._found("loglikelihood", [pair for pair, _, _ in requests]), list[int]()
        for index, ((_, continuation), context, tokens) in enumerate(requests):
            if index in answers:
                continue
            if len(tokens) > self.max_length:
                why = f"has {len(tokens)} tokens, more than the model's sequence length {self.max_length}"
                raise InputError([f"{self._where} a task's continuation {continuation[:40]!r} {why}"])
            kept = (context + tokens)[-self.max_length - 1 :]
            rows.append(Row(tokens=kept, first=len(kept) - len(tokens)))
            missing.append(index)
        for n, score in self._scorer.scores(rows, what="continuations"):
            answers[missing[n]] = (-score.nats, score.is_greedy)
            self._answers.add("loglikelihood", requests[missing[n]][0], answers[missing[n]])
        return [tuple(answers[index]) for index in range(len(requests))]

    def _found(self, kind: str, questions: Sequence[Sequence[object]]) -> dict[int, Any]:
        """The stored answers, by the index of the question."""
        return {index: found for index, question in enumerate(questions) if (found := self._answers.find(kind, question)) is not None}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that score each token once."""
        texts: list[str] = [request.args[0] for request in requests]
        found = self._found("loglikelihood_rolling", [[text] for text in texts])
        missing = [index for index in range(len(texts)) if index not in found]
        tokens = ([self.prefix_token_id, *self.tok_encode(texts[index])] for index in missing)
        rows = [list(windows(some, seq=self.max_length, stride=self.max_length)) for some in tokens]
        for n, nats in self._scorer.sums(rows, what="windows"):
            found[missing[n]] = -nats
            self._answers.add("loglikelihood_rolling", [texts[missing[n]]], -nats)
        return [found[index] for index in range(len(texts))]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that the model writes after each context, up to a stop string."""
        # Texts that are drawn differ each time.
        is_stored = [not request.args[1].get("do_sample", False) for request in requests]
        found, alike = self._found("generate_until", [request.args for request in requests]), dict[str, list[int]]()
        for index, request in enumerate(requests):
            if index not in found or not is_stored[index]:
                alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for some in alike.values():
            settings = _settings(requests[some[0]].args[1], self._where)
            room = self.max_length - settings["tokens"]
            if room < 1:
                why = f"lets the model write {settings['tokens']} tokens, and model.seq {self.max_length} leaves no room for the question"
                raise InputError([f"{self._where} a task {why}"])
            prompts = [self.tok_encode(requests[index].args[0])[-room:] for index in some]
            for piece in self._generator.pieces(prompts, batch=self._scorer.rows, **settings):
                if piece.answer.reason:
                    index = some[piece.answer.number[0]]
                    found[index] = piece.answer.text
                    if is_stored[index]:
                        self._answers.add("generate_until", requests[index].args, found[index])
        return [found[index] for index in range(len(requests))]

    @property
    def _generator(self) -> Generator:
        if self._texts is None:
            loaded, ends = self._scorer.loaded, (self.eot_token_id,)
            self._texts = Generator(loaded.setup, loaded.params, loaded.variables, self._tokenizer, ends=ends, gathers=self._gathers)
        return self._texts


def _settings(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """A task's `generation_kwargs` as keys of `generate:`. Raises InputError for one that jgt does not have."""
    kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(given), _MOST_TOKENS)}
    tokens, stop, is_drawn = kwargs.pop("max_gen_toks"), kwargs.pop("until"), kwargs.pop("do_sample")
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if unknown := kwargs.keys() - sampling.keys():
        key = sorted(unknown)[0]
        raise InputError([f"{where} a task's generation_kwargs: {key}: jgt has only {', '.join(sampling)}"])
    sampling |= kwargs | ({} if is_drawn else {"temperature": 0.0})
    return {"tokens": tokens, "stop": tuple(stop), "samples": 1, **sampling}
