"""A pipelined loss inside of a vmap over an axis of its batch is the loss of each replica, which sends nothing to another one."""

import jax
import numpy as np
import pytest
from hlo import axes_of, collectives
from models import RULES, assert_close, assert_values, compiled, decoder_loss, make_batch, make_params, mesh_of, pipeline_of

import jgt
from jgt.hlo.text import Module


def replicas_of(tree, count=2):
    """[count, ...], of which each has numbers of its own."""
    return jax.tree.map(lambda x: np.stack([x * (1 + n / 4) if x.dtype == np.float32 else np.roll(x, n) for n in range(count)]), tree)


def mapped(loss, axes, over="data"):
    """The loss and the gradients of each replica."""
    return jax.vmap(jax.value_and_grad(loss), axes, spmd_axis_name=over)


@pytest.mark.parametrize(
    ("sizes", "options", "axes"),
    [
        ({"data": 2, "fsdp": 2, "stage": 2}, {}, (None, 0)),
        pytest.param({"data": 2, "stage": 2, "tensor": 2}, {"schedule": "zb", "remat": "stage"}, (0, 0), marks=pytest.mark.slow),
        pytest.param({"data": 2, "stage": 4}, {"schedule": "gpipe"}, (0, None), marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "stage": 2}, {"schedule": "interleaved", "gather": "layer"}, (0, 0), marks=pytest.mark.slow),
    ],
)
def test_each_replica_has_its_own_loss_and_gradients(sizes, options, axes):
    mesh, plain = mesh_of(**sizes), (make_params(), make_batch(8))
    arguments = [x if axis is None else replicas_of(x) for x, axis in zip(plain, axes, strict=True)]
    pipelined = jgt.shard(decoder_loss, jgt.make_rules(RULES), mesh, pipeline=pipeline_of(**({"microbatches": 2} | options)))
    run = compiled(mapped(pipelined, axes)).lower(*arguments).compile()
    values, gradients = jax.device_get(run(*arguments))
    expected = jax.device_get(compiled(mapped(decoder_loss, axes))(*arguments))
    assert_values(values, expected[0])
    assert_close(gradients, expected[1], 1e-5)
    module = Module.parse(run.as_text())
    sent = [c for looped in (True, False) for c in collectives(module, in_loops=looped)]
    assert sent
    assert not any("data" in axes_of(c, dict(mesh.shape)) for c in sent)


def test_a_vmap_over_another_axis_is_refused():
    pipelined = jgt.shard(decoder_loss, jgt.make_rules(RULES), mesh_of(data=2, stage=2, tensor=2), pipeline=pipeline_of(microbatches=2))
    with pytest.raises(ValueError, match="inside a vmap over the mesh axis tensor, which does not split its batch"):
        jax.eval_shape(mapped(pipelined, (None, 0), "tensor"), make_params(), replicas_of(make_batch(8)))


def test_a_shard_map_around_is_refused():
    mesh = mesh_of(data=2, stage=2)
    pipelined = jgt.shard(decoder_loss, jgt.make_rules(RULES), mesh, pipeline=pipeline_of(microbatches=2))
    specs = (jax.P(), jax.P("data"))
    around = jax.shard_map(pipelined, mesh=mesh, in_specs=specs, out_specs=jax.P(), axis_names={"data"}, check_vma=False)
    with pytest.raises(ValueError, match="a pipelined function cannot be called inside shard_map"):
        jax.eval_shape(around, make_params(), make_batch(16))
