"""The sections `generate:`, `sample:` and `eval:`: how tokens are drawn, where a text ends, and the tasks of a model. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jgt.document import Bound, LocalPath

from .sections import BatchSize, Count, Fraction, Natural, NotNegative, Positive, is_installed

_Share = Annotated[float, Bound(above=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a token is drawn from the model's probabilities.

    temperature: divides the logits. 0: always the likeliest token. top_k: draws from this many of the likeliest tokens; 0: from all.
    top_p: draws from the likeliest tokens that have this probability together. min_p: draws from tokens with at least this share of the
    likeliest one's probability. repetition_penalty: makes tokens less likely that the text has already; 1: it does not.
    """

    temperature: NotNegative = 0.7
    top_k: Natural = 0
    top_p: _Share = 0.95
    min_p: Fraction = 0.0
    repetition_penalty: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Drawing):
    """The `generate:` section.

    tokens: the most new tokens of a text. stop: texts that end the answer, which does not contain them. samples: the answers to a prompt.
    batch: the prompts that run together. rules: a rules file; null: the run's rules, without what splits parameters over the batch's axes.
    """

    tokens: Count = 256
    stop: tuple[str, ...] = ()
    samples: BatchSize = 1
    batch: BatchSize = 8
    rules: LocalPath | None = None


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `sample:` section: text that the model generates when training ends.

    tokens: how many tokens to generate, at most up to model.seq. 0: none.
    prompt: the text that the sample continues.
    temperature: divides the logits before a token is drawn. 0: always the likeliest token.
    """

    tokens: Natural = 0
    prompt: str = "\n"
    temperature: NotNegative = 0.8


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The `eval:` section: the tasks of lm-evaluation-harness that training evaluates.

    tasks: their names. every: steps between evaluations on tasks. 0: only at the end. include: a folder with more tasks. limit: the first
    documents of each task. null: all. fewshot: the examples in front of each question. null: the task's own. batch: the rows that are
    computed together.
    """

    tasks: tuple[str, ...] = ()
    every: Natural = 0
    include: LocalPath | None = None
    limit: Count | None = None
    fewshot: Natural | None = None
    batch: BatchSize = 16

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys with what is wrong about them."""
        if self.tasks and not is_installed("lm_eval"):
            yield "tasks", "needs the package lm_eval. Install it: pip install 'jgt[eval]'"
        if self.include is not None and not Path(self.include).is_dir():
            yield "include", f"{self.include}: no such folder"
