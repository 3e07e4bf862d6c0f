"""The door: a generator continues texts with a model, for `jgt.load`, `jgt generate` and the sample at the end of a run.

    generator = Generator(setup, params, variables, tokenizer)
    for answer in generator.answers(["Once upon a time"], tokens=64): ...

Its programs are compiled once, for all calls.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax

from jgt import path_text
from jgt.document import InputError, Node, bind

from ..data.batches import Data
from ..data.config import DataConfig
from ..data.tokenizer import TOKENIZER_REMEDY, Tokenizer, encoded_prompt
from ..settings.sampling import GenerateConfig, Sampling
from ..setup import Setup
from ..step.state import State, Tree
from ..step.trained import merged
from .batch import TextBatch, TextRequest
from .caching import caching_of
from .programs import TextPrograms
from .rules import rules_of
from .writer import TextWriter

Prompt = str | Sequence[int]


@dataclass(kw_only=True)
class Completion:
    """The text that a model wrote after a prompt. number: the numbers of the prompt and of the sample.

    reason: `stop` or `length`; empty while it is written. tokens: all that were drawn, with the logarithms of their
    probabilities; the text ends before a stop token or a stop text.
    """

    number: tuple[int, int]
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    reason: str = ""


class NewText(NamedTuple):
    """An answer with one more token, and the text that it adds."""

    answer: Completion
    text: str


class Generator:
    """Continues texts with a model, on the mesh and by the rules of a setup.

    params, variables: as the model has them, in any layout. ends: tokens that end a text. gathers: see `TextPrograms`.
    """

    def __init__(
        self,
        setup: Setup,
        params: Tree,
        variables: Tree,
        tokenizer: Tokenizer | None,
        *,
        ends: Collection[int] = (),
        gathers: bool = False,
    ):
        config = setup.run.config
        self._programs = programs_of(setup, known=None if tokenizer is None else tokenizer.vocab_size, gathers=gathers)
        self._arrays = self._programs.placed(params, variables)
        self._tokenizer, self._ends, self._config = tokenizer, frozenset(ends), config.generate
        self.seed = config.run.seed

    def of(self, params: Tree, variables: Tree) -> Generator:
        """This generator, with its programs, of other arrays of the same setup; params=None: of none, until another call."""
        other = copy.copy(self)
        other._arrays = (None, None) if params is None else self._programs.placed(params, variables)
        return other

    def adapted(self, factors: Tree) -> Generator:
        """This generator with other adapters, whose factors are given; all other arrays and the programs are the same objects."""
        other, (params, variables) = copy.copy(self), self._arrays
        here = {path_text(path): x for path, x in jax.tree.leaves_with_path(params)}

        def placed(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
            old = here[path_text(path)]
            return jax.device_put(x.astype(old.dtype), old.sharding)

        other._arrays = merged(params, jax.tree.map_with_path(placed, factors)), variables
        return other

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._programs.caching.longest

    def writer(self, rows: int) -> TextWriter:
        """A writer without requests, for a caller whose requests come one after another. rows: those that are answered together."""
        return TextWriter(TextBatch(self._programs, *self._arrays, rows=rows), self._decoded)

    def settings(self, **changes: object) -> GenerateConfig:
        """The section `generate:` with these keys. Raises InputError for values that it cannot have."""
        problems: list[str] = []
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in {**asdict(self._config), **changes}.items()}
        config: GenerateConfig | None = bind(Node.of(given, "generate", "generate"), GenerateConfig, problems)
        if config is None or problems:
            raise InputError(problems)
        return config

    def requests(self, prompts: Sequence[Prompt], *, seed: int | None = None, **changes: object) -> list[TextRequest]:
        """The requests of prompts, texts or tokens: `samples` for each, in order. changes: keys of the section `generate:`.

        Raises InputError, also for a prompt that leaves no room for an answer.
        """
        config = self.settings(**changes)
        seed = self.seed if seed is None else seed
        firsts = [self._request(prompt, config, seed) for prompt in prompts]
        numbers = ((request, n * config.samples + k) for n, request in enumerate(firsts) for k in range(config.samples))
        return [replace(request, number=number) for request, number in numbers]

    def _request(self, prompt: Prompt, config: GenerateConfig, seed: int) -> TextRequest:
        tokens, vocab = self._encoded(prompt) if isinstance(prompt, str) else [*prompt], self._programs.vocab
        if len(tokens) >= self.longest:
            why = f"the prompt has {len(tokens):,} tokens, and model.seq {self.longest:,} leaves no room for an answer"
            raise InputError([f"{why}. Shorten it, or raise model.seq if the model's positions are rotary"])
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            raise InputError([f"the prompt has the token {wrong[0]}, but model.vocab is {vocab:,}"])
        sampling = Sampling(**{key.name: getattr(config, key.name) for key in fields(Sampling)})
        return TextRequest(tokens=tokens or [0], limit=config.tokens, sampling=sampling, seed=seed, ends=self._ends, stop=config.stop)

    def pieces(self, prompts: Sequence[Prompt], *, seed: int | None = None, **changes: object) -> Iterator[NewText]:
        """The answers to prompts as they are written, token by token. changes: keys of the section `generate:`. Raises InputError."""
        config = self.settings(**changes)
        # All of them first, so that a wrong one is reported before any text.
        waiting = deque(self.requests(prompts, seed=seed, **changes))
        answers = {request: Completion(number=divmod(request.number, config.samples)) for request in waiting}
        writer = self.writer(min(config.batch, len(waiting) or 1))
        while waiting or writer.batch.is_busy:
            for token, text, reason in writer.write([waiting.popleft() for _ in range(min(len(waiting), writer.batch.num_free))]):
                answer = answers[token.request]
                answer.tokens.append(token.token)
                answer.logprobs.append(token.log)
                answer.text += text
                answer.reason = reason
                yield NewText(answer, text)

    def answers(self, prompts: Sequence[Prompt], *, seed: int | None = None, **changes: object) -> list[Completion]:
        """The whole answers to prompts, in their order; `samples` to each. Raises InputError."""
        done = [piece.answer for piece in self.pieces(prompts, seed=seed, **changes) if piece.answer.reason]
        return sorted(done, key=lambda answer: answer.number)

    def _encoded(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InputError([f"the model has no tokenizer, so a prompt must be a list of tokens. {TOKENIZER_REMEDY}"])
        return encoded_prompt(self._tokenizer, text)

    @property
    def _decoded(self) -> Callable[[Sequence[int]], str]:
        return (lambda tokens: "") if self._tokenizer is None else self._tokenizer.decode


def programs_of(setup: Setup, *, known: int | None = None, gathers: bool = False) -> TextPrograms:
    """The programs of a setup's model. known: the number of the tokenizer's ids. gathers: see `TextPrograms`."""
    config, mesh, model = setup.run.config, setup.mesh, setup.program.model
    rules, batch = rules_of(setup.run, mesh.shape, gathers=gathers)
    return TextPrograms(
        model=model,
        caching=caching_of(config.model, has_cache=model.has_cache),
        rules=rules,
        mesh=mesh,
        batch=batch,
        vocab=config.model.vocab,
        known=min(config.model.vocab, known or config.model.vocab),
        pads=bool(setup.storage.padded),
        gathers=gathers,
    )


def sample_text(setup: Setup, state: State, data: Data) -> str:
    """The prompt of `sample:` and what the model writes after it, as far as its sequence reaches. A long prompt is cut to its end."""
    config, tokenizer = setup.run.config, data.tokenizer
    assert tokenizer is not None
    # A model of masked documents or of chats has not learnt how a text begins after the end of another.
    has_chats = isinstance(config.data, DataConfig) and config.data.has_chats
    ends = tokenizer.special.ends if has_chats else () if data.end is None else (data.end,)
    params, variables = setup.model_params(setup.eval_params(state)), setup.eval_variables(state)
    # At the end of a run, memory is full of the optimizer's state.
    generator = Generator(setup, params, variables, tokenizer, ends=ends, gathers=True)
    known = [token for token in encoded_prompt(tokenizer, config.sample.prompt) if token < config.model.vocab] or [0]
    prompt = known[-max(config.model.seq - 1, 1) :]
    limits: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "samples": 1, "stop": ()}
    (answer,) = generator.answers([prompt], tokens=config.sample.tokens, temperature=config.sample.temperature, **limits)
    return tokenizer.decode(prompt) + answer.text
