"""The sections `generate:`, `sample:` and `eval:`: how tokens are drawn, where a text ends, and the tasks of a model. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jgt.document import Bound, LocalPath

from .numbers import BatchSize, Count, Fraction, Natural, NotNegative, Positive
from .packages import is_installed

_Share = Annotated[float, Bound(above=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from the model's probabilities.

    temperature: divides the logits; 0: always the likeliest token.
    top_k: draws from this many of the likeliest tokens; 0: from all.
    top_p: draws from the likeliest tokens that have this probability together ([arXiv 1904.09751](https://arxiv.org/abs/1904.09751)).
    min_p: draws from tokens with at least this share of the likeliest one's probability ([arXiv
    2407.01082](https://arxiv.org/abs/2407.01082)).
    repetition_penalty: divides the positive logits of tokens that the text has already, and multiplies negative ones ([arXiv
    1909.05858](https://arxiv.org/abs/1909.05858)).
    """

    temperature: NotNegative = 0.7
    top_k: Natural = 0
    top_p: _Share = 0.95
    min_p: Fraction = 0.0
    repetition_penalty: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Sampling):
    """The `generate:` section.

    tokens: the most new tokens of an answer. An answer also ends at `model.seq`.
    stop: texts that end an answer, which does not contain them. They may begin and end inside of tokens.
    samples: the answers to each prompt.
    batch: the prompts that run together. A row that is done gets the next prompt.
    rules: a rules file for generation; null: the run's rules, with [some differences](generate.md#the-rules-of-generation).
    """

    tokens: Count = 256
    stop: tuple[str, ...] = ()
    samples: BatchSize = 1
    batch: BatchSize = 8
    rules: LocalPath | None = None


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `sample:` section: text that the model generates when training ends.

    tokens: the number of tokens to generate when training ends, at most until `seq` is full; 0: none.
    prompt: the beginning of the generated text.
    temperature: the sampling temperature; 0: always the most likely token.
    """

    tokens: Natural = 0
    prompt: str = "\n"
    temperature: NotNegative = 0.8


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The `eval:` section: the tasks of lm-evaluation-harness that training evaluates.

    tasks: the names of tasks. Their metrics are logged as `eval_METRIC/TASK`, such as `eval_acc/hellaswag`.
    every: steps between two evaluations on tasks; 0: only after the last step, where there is always one.
    include: a folder with more tasks, as the harness's YAML files. They may name code, so a file with this key needs `--allow-command`.
    limit: only the first documents of each task; null: all.
    fewshot: the number of examples in front of each question; null: the task's own.
    chat: whether questions are messages of a chat, by the model's chat template, and examples earlier turns of it.
    batch: the rows that are computed together.
    """

    tasks: tuple[str, ...] = ()
    every: Natural = 0
    include: LocalPath | None = None
    limit: Count | None = None
    fewshot: Natural | None = None
    chat: bool = False
    batch: BatchSize = 16

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys with what is wrong about them."""
        if self.tasks and not is_installed("lm_eval"):
            yield "tasks", "needs the package lm_eval. Install it: pip install 'jgt[eval]'"
        if self.include is not None and not Path(self.include).is_dir():
            yield "include", f"{self.include}: no such folder"
