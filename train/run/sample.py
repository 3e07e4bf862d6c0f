"""Text from a model: tokens drawn one after another, in one compiled loop.

The loop calls the model on a whole sequence for each token and keeps no cache of keys and values. That costs more compute than a decoder
needs, but a sample is short, and the model needs no second code path that would have to agree with the first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgt

from ..data.batches import Data
from ..setup import Setup
from ..step.state import State


def sample_text(setup: Setup, state: State, data: Data) -> str:
    """The prompt and what the model writes after it: `sample.tokens` tokens, or fewer if the model's sequence length ends before."""
    config, tokenizer, rows = setup.run.config, data.tokenizer, setup.run.config.train.batch
    assert tokenizer is not None
    # The model's vocabulary may be smaller than the tokenizer's. An empty prompt becomes one token, so that there is a last logit.
    encoded = [*tokenizer.special.beginning, *tokenizer.encode(config.sample.prompt)]
    prompt = [token for token in encoded if token < config.model.vocab] or [0]
    # A long prompt is cut to its end, because at least one position has to remain free.
    prompt = prompt[-max(config.model.seq - 1, 1) :]
    count = min(config.sample.tokens, config.model.seq - len(prompt))
    # The rules lay out rows over devices, so a single row may not be possible. All rows start equal, and only the first is shown.
    per_device, _ = setup.batch_shardings["inputs"].shard_shape((rows, config.model.seq))
    tokens = np.zeros((rows // per_device, config.model.seq), np.int32)
    tokens[:, : len(prompt)] = prompt
    pad = bool(setup.storage.padded)
    apply = jgt.shard(setup.program.model.apply, setup.storage.model.rules, setup.mesh, state="variables", partial=True, pad=pad)

    def generate(params: Any, variables: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        def extend(position: jax.Array, tokens: jax.Array) -> jax.Array:
            # [rows, vocab]: the logits after the last token so far.
            logits = jax.lax.dynamic_index_in_dim(apply(params, variables, tokens), position - 1, axis=1, keepdims=False)
            # The model's vocabulary may be rounded up: tokens that the tokenizer does not know are never drawn.
            known = jnp.arange(config.model.vocab)[None, :] < tokenizer.vocab_size
            logits = jnp.where(known, logits, -jnp.inf)
            if config.sample.temperature == 0:
                chosen = jnp.argmax(logits, -1)
            else:
                chosen = jax.random.categorical(jax.random.fold_in(key, position), logits / config.sample.temperature)
            return jax.lax.dynamic_update_slice_in_dim(tokens, chosen.astype(jnp.int32)[:, None], position, axis=1)

        return jax.lax.fori_loop(len(prompt), len(prompt) + count, extend, tokens)

    run = jax.jit(generate, out_shardings=setup.storage.model.replicated())
    params, variables = setup.model_params(setup.eval_params(state)), setup.eval_variables(state)
    after = np.asarray(run(params, variables, tokens, jax.random.key(config.run.seed)))
    ids = after[0, : len(prompt) + count].tolist()
    # A model of masked documents has not learnt how a text begins after the end of another.
    if data.end in (written := ids[len(prompt) :]):
        ids = prompt + written[: written.index(data.end)]
    return tokenizer.decode(ids)


def terminal_text(text: str) -> str:
    """The text with a replacement character for each one that is not printable: a model may write control sequences of a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
