"""`jgt:fsdp` on twenty models that name nothing: stored in equal parts, right, and sending no more than rules that a person wrote."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign import FOREIGN, wide

import jgt
from jgt.sharding.chosen import SMALL

QUICK = ("gat", "mlp", "wavenet")
each_model = pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FOREIGN])


@pytest.fixture(autouse=True)
def allows_what_strangers_write():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def mesh():
    return jgt.make_mesh({"fsdp": 8})


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0))


@each_model
def test_large_parameters_are_stored_in_equal_parts(name, mesh):
    model = FOREIGN[name]()
    for rules in ("jgt:fsdp", "jgt:zero1", "jgt:any"):
        of = mesh if rules != "jgt:zero1" else jgt.make_mesh({"data": 8})
        storage = jgt.shard(model.loss, rules, of, pad=True).storage_for((shapes_of(model), model.batch))
        assert len(storage.placement.parameters) == len(jax.tree.leaves(shapes_of(model)))
        for model_place, stored in zip(storage.model.parameters, storage.placement.parameters, strict=True):
            whole = math.prod(model_place.shape) * model_place.dtype.itemsize
            if math.prod(model_place.shape) >= SMALL:
                assert stored.bytes_per_device(of) <= 1.1 * whole / 8, stored
            assert math.prod(stored.shape) <= 1.05 * math.prod(model_place.shape), stored
            assert not any(stored.dims[dim] for dim in model_place.sliced)


@each_model
def test_the_layout_changes_no_number(name, mesh):
    model = FOREIGN[name]()
    params = model.init(jax.random.key(0))
    sharded = jgt.shard(model.loss, "jgt:fsdp", mesh)
    placement = sharded.placement(params, model.batch)
    assert any(any(p.dims) for p in placement.parameters)
    places = (placement.params, placement.inputs(model.batch))
    step = jax.jit(jax.value_and_grad(sharded), in_shardings=places, out_shardings=(placement.replicated(), placement.gradients))
    found = step(*jax.device_put((params, model.batch), places))
    expected = jax.jit(jax.value_and_grad(model.loss))(params, model.batch)
    assert found[1] is not None and float(expected[0]) != 0
    # Some gradients, as those of the biases of keys, are zero but for rounding.
    rounding = 1e-6 * max(float(jnp.max(jnp.abs(b))) for b in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))) + rounding)


@each_model
def test_it_sends_no_more_than_rules_written_by_hand(name, mesh):
    model = FOREIGN[name]()
    assert bytes_sent(model, "jgt:fsdp", mesh) <= 1.15 * bytes_sent(model, model.by_hand, mesh)


@each_model
def test_the_rules_that_were_chosen_are_a_rules_file(name, mesh):
    model = FOREIGN[name]()
    chosen = jgt.shard(model.loss, "jgt:fsdp", mesh).placement(shapes_of(model), model.batch)
    written = jgt.shard(model.loss, chosen.rules.tree(), mesh).placement(shapes_of(model), model.batch)
    assert [p.dims for p in written.parameters] == [p.dims for p in chosen.parameters]
    assert written.rules == chosen.rules


def bytes_sent(model, rules, mesh):
    """The bytes of all collectives in the gradient of a batch of 512 rows."""
    sharded, batch = jgt.shard(model.loss, rules, mesh), wide(model.batch)
    placement = sharded.placement(shapes_of(model), batch)
    shardings = {
        "in_shardings": (placement.params, placement.inputs(batch)),
        "out_shardings": (placement.replicated(), placement.gradients),
    }
    return sum(c.total_bytes for c in jgt.plan(jax.jit(jax.value_and_grad(sharded), **shardings), shapes_of(model), batch).collectives)
