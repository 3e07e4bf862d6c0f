"""A model with its arrays, to be used: its logits, its texts, its tokens.

    loaded = jgt.load("hf:Qwen3-8B", mesh={"fsdp": 8}, rules="jgt:fsdp")
    logits = loaded.logits([loaded.tokenizer.encode("Hello")])

It comes from a run directory or a published folder (`train.run.load`), or is what a run in training has at a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

import jgt

from ..data.special import declared_ends
from ..data.tokenizer import Tokenizer, open_tokenizer
from ..files.cache import local_folder
from ..models.config import ModelConfig, OwnModel
from ..setup import Setup
from ..step.state import Tree
from ..step.trained import merged
from .generate import Completion, Generator


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with its arrays, params and variables as `train.models.model` explains them, in the layout of `setup`.

    step: the updates of its run; 0 for a published model. tokenizer_name: as `data.tokenizer`; None if the model has none. adapters: the
    factors of several adapters by name, of which the arrays have one with the largest rank.
    """

    setup: Setup
    params: Any
    variables: Any
    step: int
    tokenizer_name: str | None
    adapters: Mapping[str, Tree] = field(default_factory=dict[str, Tree])

    @property
    def config(self) -> ModelConfig | OwnModel:
        """The `model:` section."""
        return self.setup.run.config.model

    @property
    def model(self) -> Any:
        """The module with these arrays: an nnx.Module, or a bound module of linen."""
        return self.setup.program.model.module(self.params, self.variables)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model's texts; None if there is none. Raises InputError if its file cannot be read."""
        return None if self.tokenizer_name is None else open_tokenizer(self.tokenizer_name)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which generation stops. Without a tokenizer they are those that the folder of a published model names."""
        if self.tokenizer is not None:
            return self.tokenizer.special.ends
        folder = self.config.hf if isinstance(self.config, ModelConfig) else None
        return () if folder is None else declared_ends(local_folder(folder, weights=False))

    def of(self, params: Tree | None, variables: Tree | None, step: int) -> Loaded:
        """The same model with other arrays, or with None, which needs no programs that this one has compiled."""
        other, made = replace(self, params=params, variables=variables, step=step), dict(self.__dict__)
        other.__dict__.update({name: made[name] for name in ("tokenizer", "apply") if name in made})
        if "generator" in made:
            other.__dict__["generator"] = made["generator"].of(params, variables)
        return other

    def adapted(self, name: str) -> Loaded:
        """The model with one of its adapters. All else is shared with this one: the other arrays, and the compiled programs."""
        factors = self.adapters[name]
        return self._with(merged(self.params, factors), self.generator.adapted(factors))

    def writer(self) -> Loaded:
        """The model for its generator alone, whose arrays have the layout and types of generation: the others would be a second copy."""
        return self._with(None, self.generator)

    def _with(self, params: Tree | None, generator: Generator) -> Loaded:
        other = replace(self, params=params)
        other.__dict__.update(apply=self.apply, tokenizer=self.tokenizer, generator=generator)
        return other

    @functools.cached_property
    def generator(self) -> Generator:
        """The generator that continues texts with the model. Its programs are compiled once."""
        return Generator(self.setup, self.params, self.variables, self.tokenizer, ends=self.ends)

    def generate(self, prompts: Sequence[str | Sequence[int]], *, seed: int | None = None, **keys: object) -> list[Completion]:
        """The answers to prompts, texts or lists of tokens. keys: keys of the section `generate:`. Raises InputError."""
        return self.generator.answers(prompts, seed=seed, **keys)

    def logits(self, tokens: ArrayLike) -> jax.Array:
        """The logits [rows, n, vocab] of tokens [rows, n], each row a text from its beginning. Raises ValueError for others."""
        ids, seq, vocab = np.asarray(tokens), self.config.seq, self.config.vocab
        if ids.ndim != 2 or not 0 < ids.shape[1] <= seq:
            raise ValueError(f"the tokens have the shape {list(ids.shape)}. Pass rows of equal length, of at most model.seq {seq} tokens")
        if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < vocab):
            # JAX would read another token in its place.
            found = f"from {ids.min()} to {ids.max()}" if ids.size else "none"
            raise ValueError(f"the tokens are {found} ({ids.dtype}). Pass whole numbers from 0 to {vocab - 1}, below model.vocab {vocab}")
        rows = len(ids)
        # The rules may split rows over devices. A decoder's rows do not meet.
        shards = math.prod(self.setup.mesh.shape.get(axis, 1) for axis in self.setup.run.batch_dims[0])
        return self.apply(self.params, self.variables, np.pad(ids.astype(np.int32), ((0, -rows % shards), (0, 0))))[:rows]

    @functools.cached_property
    def apply(self) -> Callable[[Tree, Tree, ArrayLike], jax.Array]:
        """The function (params, variables, tokens) → logits under the rules, compiled. It takes as many rows as the rules can split."""
        storage, pads = self.setup.storage, bool(self.setup.storage.padded)
        apply, rules = self.setup.program.model.apply, storage.model.rules.for_rows("plain")
        return jax.jit(jgt.shard(apply, rules, self.setup.mesh, state="variables", partial=True, pad=pads))
