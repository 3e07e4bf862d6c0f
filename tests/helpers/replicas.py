"""The first steps of a run with replicas, and what its programs send."""

from itertools import islice
from pathlib import Path

import jax
import numpy as np
from hlo import axes_of, collectives

from jgt.planner.hlo.text import Module
from train.data.opening import open_data
from train.setup.feed import Feed


def first_steps(setup, num_steps, *, repeat=False):
    """The state after some steps, and their losses, [step] or [step, replica]. repeat: all replicas have the rows of the first."""
    config = setup.run.config
    data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused"))
    state, step, exchange, losses = setup.init(), setup.compile_train_step(), setup.compile_exchanges(), []
    half = config.train.batch // 2
    for number, batch in enumerate(islice(Feed(data, setup).train(0), num_steps), 1):
        twice = {name: np.concatenate([np.asarray(x)[:half]] * 2) for name, x in batch.items()} if repeat else {}
        state, metrics = step(state, jax.device_put(twice, setup.batch_shardings) if repeat else batch, setup.settings(number))
        losses.append(jax.device_get(metrics["loss"]))
        if exchange is not None:
            state, _ = exchange.after(state, number, is_last=False)
    return state, np.array(losses)


def over(compiled, setup):
    """The axes that the collectives of a program cross."""
    module = Module.parse(compiled.as_text())
    return {a for looped in (True, False) for c in collectives(module, in_loops=looped) for a in axes_of(c, dict(setup.mesh.shape))}


def assert_equal_on_all_devices(tree):
    """Devices that hold the same part of an array have the same bits."""
    for x in jax.tree.leaves(tree):
        held = {}
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(held.setdefault(str(shard.index), np.asarray(shard.data)), shard.data)


def sent(plan):
    """What a program sends, by kind, type and axes: a row for each kind of collective."""
    return sorted((c.kind, c.dtype, c.axes, c.count, c.total_bytes) for c in plan.collectives)
