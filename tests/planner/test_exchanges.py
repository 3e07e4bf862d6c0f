"""Plans of experts on several devices: rounds that are not expected, and all-to-alls of as many rows as there are."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import NamedSharding
from plugin import needs_plugin

import jgt
from jgt import signal
from jgt.planner.findings import REPEATED
from jgt.planner.plan import plan

TOKENS, CHOICES, EXPERTS, EMBED, FFN = 512, 2, 8, 16, 32
GPUS = "h100:1x8"


def grouped(rows, sizes, weights):
    return jax.lax.ragged_dot(rows, weights, sizes)


def placed(factor=1.25):
    """A gradient through experts on 4 devices; with this capacity factor, for 40 of the 128 rows of a device on each of them."""
    mesh, keys = jgt.make_mesh({"data": 2, "expert": 4}), {"axis": "expert", "capacity_factor": factor}
    rules = {
        "axes": {"batch": ["data", "expert"]},
        "inputs": {"**": ["batch"]},
        "default": "replicate",
        "signals": {"moe": {"params": {"experts": ["expert", None, None]}, "experts": keys}},
    }

    def loss(params, batch):
        x = batch["x"] @ params["in"]
        with signal.context("moe"):
            return jnp.sum(signal.experts(grouped, params["experts"], x, batch["choice"], jnp.ones((TOKENS, CHOICES))) ** 2)

    shapes = {"in": (EMBED, EMBED), "experts": (EXPERTS, EMBED, FFN)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = {"x": jax.ShapeDtypeStruct((TOKENS, EMBED), jnp.float32), "choice": jax.ShapeDtypeStruct((TOKENS, CHOICES), jnp.int32)}
    return jax.grad(jgt.shard(loss, rules, mesh)), params, batch


def exchanged(found):
    """The bytes of rows that a device sends to others."""
    return sum(c.total_bytes for c in found.collectives if c.kind == "all-to-all" and c.bytes > 1000)


@pytest.mark.parametrize("target", [None, pytest.param(GPUS, marks=needs_plugin)])
def test_one_round_counts_and_a_sentence_says_what_another_costs(target):
    found = plan(*placed(), target=target)
    # Tokens go there and results come back; cotangents go there and gradients come back. The backward pass reads the same tokens.
    sent = 4 * 40 * 4 * 3 // 4
    assert exchanged(found) == sent * (EMBED + FFN + FFN + EMBED)
    assert not found.findings
    (said,) = [line for line in found.assumptions if line.startswith("experts:")]
    assert "each exchange counts as one round" in said
    # In a loop of its own each pass sends the tokens.
    more = float(re.search(r"sends ([\d.]+) KB more in a step", said)[1]) * 1000
    assert more == pytest.approx(sent * (EMBED + FFN + FFN + EMBED + EMBED), rel=0.02)


def test_rows_that_have_room_and_are_not_there_are_not_repeated_work():
    exact, twice = (plan(*placed(factor)) for factor in (1.0, 2.0))
    assert "computed-alike" not in {finding.kind for finding in twice.findings}
    one, two = (next(row for row in found.signals if row.signal == "moe") for found in (exact, twice))
    assert two.flops_share == 2 * one.flops_share
    assert REPEATED * one.flops_share < two.flops < REPEATED * two.flops_share
    assert twice.model_flops_per_device == exact.model_flops_per_device


@needs_plugin
def test_a_ragged_all_to_all_counts_rows_and_not_room():
    mesh = jgt.make_mesh({"expert": 8})

    def sent(rows, room):
        def local(x):
            ones = jnp.ones(8, jnp.int32)
            begin = jnp.arange(8, dtype=jnp.int32)
            return jax.lax.ragged_all_to_all(x, jnp.zeros((room, 16)), begin, ones, begin, ones, axis_name="expert")

        x = jax.ShapeDtypeStruct((8 * rows, 16), jnp.float32, sharding=NamedSharding(mesh, P("expert")))
        found = plan(jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False), x, target=GPUS)
        return [c.bytes for c in found.collectives if c.kind == "ragged-all-to-all"]

    # There and back: what is larger is the worst case.
    assert sent(32, 256) == sent(256, 32) == [32 * 16 * 4 * 7 // 8]
