"""Text from a model: tokens drawn one after another, in one compiled loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgt
from train.data.batches import Data
from train.setup import Setup
from train.step import State


def sample_text(setup: Setup, state: State, data: Data) -> str:
    """The prompt and what the model writes after it, `sample.tokens` tokens or up to its sequence length."""
    config = setup.run.config
    known = [token for token in data.encode(config.sample.prompt) if token < config.model.vocab] or [0]
    prompt = known[-max(config.model.seq - 1, 1) :]
    count = min(config.sample.tokens, config.model.seq - len(prompt))
    # As few rows as the rules can lay out; they all start alike and only the first is shown.
    per_device, _ = setup.batch_shardings["inputs"].shard_shape((config.train.batch, config.model.seq))
    tokens = np.zeros((config.train.batch // per_device, config.model.seq), np.int32)
    tokens[:, : len(prompt)] = prompt
    apply = jgt.shard(setup.model.apply, setup.placement.rules, setup.mesh, partial=True)

    def generate(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        def extend(position: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = jax.lax.dynamic_index_in_dim(apply(params, tokens), position - 1, axis=1, keepdims=False)
            # The model may know more tokens than the tokenizer: a vocabulary rounded up.
            known = jnp.arange(config.model.vocab)[None, :] < data.vocab_size
            logits = jnp.where(known, logits, -jnp.inf)
            if config.sample.temperature == 0:
                chosen = jnp.argmax(logits, -1)
            else:
                chosen = jax.random.categorical(jax.random.fold_in(key, position), logits / config.sample.temperature)
            return jax.lax.dynamic_update_slice_in_dim(tokens, chosen.astype(jnp.int32)[:, None], position, axis=1)

        return jax.lax.fori_loop(len(prompt), len(prompt) + count, extend, tokens)

    run = jax.jit(generate, out_shardings=setup.placement.replicated())
    ids = np.asarray(run(state.params, tokens, jax.random.key(config.run.seed)))[0, : len(prompt) + count]
    return data.decode(ids.tolist())
