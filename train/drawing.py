"""The sections `generate:` and `sample:`: how tokens are drawn, and where a text ends. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jgt.document import Bound, LocalPath

from .sections import BatchSize, Count, Fraction, Natural, NotNegative, Positive

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
