"""A stranger's llama, in nnx and in linen, sends what the shipped llama sends under the shipped rules, signal by signal."""

from collections import Counter
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from plugin import needs_plugin
from strangers import LinenLlama, NnxLlama

import jgt
from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.model import of_flax

ROOT = Path(__file__).parent.parent.parent
CONFIG = ModelConfig(layers=2, embed=64, heads=4, ffn=128, vocab=512, seq=64, dtype="bf16", attention="xla")
TOKENS = jax.ShapeDtypeStruct((16, CONFIG.seq), jnp.int32)
MESHES = {
    "fsdp": {"fsdp": 8},
    "fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp_sequence": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipeline": {"data": 2, "fsdp": 2, "stage": 2, "tensor": 1},
}


@cache
def model_of(kind):
    if kind == "shipped":
        return build(CONFIG)
    make = {"nnx": lambda rngs: NnxLlama(CONFIG, jnp.bfloat16, rngs=rngs), "linen": lambda rngs: LinenLlama(CONFIG, jnp.bfloat16)}[kind]
    return of_flax(make, lambda module: module(jnp.zeros(TOKENS.shape, TOKENS.dtype)))


@cache
def sent(kind, rules, target):
    """The bytes of each signal's collectives by phase, kind and type, in the gradient of a loss of the model."""
    devices = jax.devices() if target is None else devices_of(Target.parse(target))
    mesh, model = jgt.make_mesh(MESHES[rules], devices=devices), model_of(kind)

    def loss(params, inputs, targets):
        logits = model.apply(params, {}, inputs)
        with jgt.signal.context("head"):
            is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0), axis=-1))

    pipeline = jgt.Pipeline(signal="layers", axis="stage", microbatches=2, schedule="1f1b") if "stage" in MESHES[rules] else None
    sharded = jgt.shard(loss, ROOT / f"configs/rules/{rules}.yaml", mesh, pipeline=pipeline)
    params = jax.eval_shape(model.init, jax.random.key(0))[0]
    placement = sharded.placement(params, TOKENS, TOKENS)
    step = jax.jit(
        jax.value_and_grad(sharded),
        in_shardings=(placement.params, placement.inputs(TOKENS, "inputs"), placement.inputs(TOKENS, "targets")),
        out_shardings=(placement.replicated(), placement.gradients),
    )
    found = Counter()
    for c in jgt.plan(step, params, TOKENS, TOKENS, target=target).collectives:
        # For GPUs XLA sends the gradients of all norms of a layer at once, under the signal of one of them.
        signal = c.signal if target is None else c.signal.partition("/")[0]
        found[signal, c.phase, c.kind, c.dtype] += c.total_bytes
    return found


assert_same = pytest.mark.parametrize(("kind", "rules"), [(kind, rules) for rules in MESHES for kind in ("nnx", "linen")])


@assert_same
def test_strangers_send_the_same_bytes(kind, rules):
    assert sent(kind, rules, None) == sent("shipped", rules, None)


@needs_plugin
@pytest.mark.slow
@assert_same
def test_so_they_do_on_described_gpus(kind, rules):
    found, shipped = sent(kind, rules, "h100:1x8"), sent("shipped", rules, "h100:1x8")
    if (kind, rules) == ("nnx", "fsdp_sequence"):
        # XLA puts a transpose between this lookup's sum and its slice, so that no reduce-scatter can do both: twice the bytes are sent.
        of_lookup = {("embed", "forward", one, "bf16") for one in ("all-reduce", "reduce-scatter")}
        assert sum(found[one] for one in of_lookup) <= 2 * sum(shipped[one] for one in of_lookup)
        found, shipped = (Counter({key: n for key, n in one.items() if key not in of_lookup}) for one in (found, shipped))
    assert found == shipped
    if rules == "fsdp_tensor":
        # A device gets its part of the table's gradient alone.
        assert found["embed", "backward", "reduce-scatter", "bf16"] > 0
