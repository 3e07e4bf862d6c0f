"""The rounds and the dropped rows of an exchange, by counts, against those of the exchange itself."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jgt
from jgt.replacements.experts.experts import Experts

SEQ = 24
MESHES = [{"data": 2, "expert": 4}, {"expert": 4, "data": 2}, {"data": 2, "expert": 2, "fsdp": 2}, {"expert": 8}]
FACTORS = [1.0, 1.25]
GRID = list(itertools.product(MESHES, FACTORS, ("rounds", "drop"), (0.0, 1.0, 9.0)))
QUICK = [(MESHES[0], 1.0, "drop", 1.0), (MESHES[1], 1.0, "rounds", 1.0), (MESHES[2], 1.0, "rounds", 0.0)]


def exchange_on(mesh, **experts):
    rules = {"axes": {"batch": list(mesh)}, "signals": {"moe": {"experts": {"axis": "expert", **experts}}}, "inputs": {"*": ["batch"]}}
    return Experts(jgt.make_rules({**rules, "default": "replicate"})).exchange_at("moe", 3, mesh)


def really_served(exchange, mesh, choice, num_experts):
    """By the exchange: the most rounds of any device, and the share of choices that the first round left out."""

    def on_device(choice):
        dispatch = exchange.dispatch(choice.reshape(-1, choice.shape[-1]), num_experts // exchange.num_devices)
        one = dispatch.start(0)
        ones = jnp.ones((math.prod(choice.shape[:-1]), 1), jnp.float32)
        kept = jnp.sum(one.to_tokens(one.to_experts(ones)), axis=1)
        rounds = jnp.int32(dispatch.rounds)
        return jax.lax.pmax(rounds, tuple(mesh)), jax.lax.psum(jnp.sum(kept), tuple(mesh))

    run = jax.shard_map(on_device, mesh=jgt.make_mesh(mesh), in_specs=P(tuple(mesh)), out_specs=(P(), P()), check_vma=False)
    rounds, kept = jax.jit(run)(choice)
    return int(rounds), 1 - float(kept) / choice.size


@pytest.mark.parametrize(
    ("mesh", "factor", "over", "skew"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=str(one)) for one in GRID]
)
def test_counts_say_what_the_exchange_did(mesh, factor, over, skew):
    num_experts, num_choices = 16, 3
    chance = np.random.default_rng(0)
    ranked = chance.gumbel(size=(32, SEQ, num_experts)) - skew * np.arange(num_experts)
    choice = np.argsort(-ranked)[..., :num_choices].astype(np.int32)
    exchange = exchange_on(mesh, capacity_factor=factor, over=over)
    counts = np.stack([np.bincount(row.reshape(-1), minlength=num_experts) for row in choice]).astype(np.int32)
    assert exchange.can_count(*counts.shape)
    rounds, dropped = exchange.served(jnp.asarray(counts)[None], SEQ, num_choices)
    wanted = really_served(exchange, mesh, choice, num_experts)
    if over == "rounds":
        assert (int(rounds[0]), float(dropped[0])) == (wanted[0], 0.0)
    else:
        assert int(rounds[0]) == 1
        assert float(dropped[0]) == pytest.approx(wanted[1], abs=1e-6)
        assert skew == 0 or wanted[1] > 0


def test_counts_of_rows_do_not_say_where_the_tokens_of_a_split_sequence_are():
    rules = {"axes": {"batch": ["expert"]}, "signals": {"moe": {"experts": {"axis": "expert"}}}, "default": "replicate"}
    split = Experts(jgt.make_rules({**rules, "inputs": {"*": ["batch", "seq"]}})).exchange_at("moe", 3, {"expert": 4, "seq": 2})
    assert not split.can_count(32, 8)


def test_rows_that_stay_on_their_device_are_not_exchanged():
    assert exchange_on({"data": 8, "expert": 1}) is None
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    assert Experts(rules).exchange_at("moe", 3, {"data": 8}) is None
