"""Stages with given or chosen numbers of layers compute what one device does, and run no padding."""

import json

import jax
import jax.numpy as jnp
import pytest
from models import assert_exact, case, decoder_loss, embed, loss_of, make_batch, make_params, mesh_of, mlp, pipeline_of

import jgt
from jgt.document import InputError
from jgt.signal import context


def branching(params, batch):
    """A decoder whose layer 1 does three times the work."""

    def layer(x, scanned):
        weights, is_heavy = scanned
        return jax.lax.cond(is_heavy, lambda x: mlp(mlp(mlp(x, weights), weights), weights), lambda x: mlp(x, weights), x), None

    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(layer, x, (params["layers"], jnp.arange(len(params["layers"]["up"])) == 1))
    return loss_of(params, x, batch)


@pytest.mark.parametrize(
    ("schedule", "layers", "sizes", "options"),
    [
        ("1f1b", (1, 3), {"stage": 2, "data": 2}, {}),
        pytest.param("zb", (3, 1, 1, 2), {"stage": 4}, {"remat": "stage"}, marks=pytest.mark.slow),
        ("interleaved", (1, 1, 3, 2), {"stage": 2}, {"remat": "layer"}),
        pytest.param("zb", (3, 1), {"stage": 2, "fsdp": 2}, {"gather": "layer"}, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_one_device(schedule, layers, sizes, options):
    assert_exact(case(decoder_loss, make_params(sum(layers)), make_batch()), mesh_of(**sizes), schedule=schedule, layers=layers, **options)


def test_layers_of_unequal_work_are_those_of_one_device():
    assert_exact(case(branching, make_params(4), make_batch()), mesh_of(stage=2), schedule="1f1b", layers=(1, 3))


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"layers": (1, 2)}, {"stage": 2}, "pipeline: layers: 2 chunks with 3 layers, but there are 2 and 4"),
        ({"layers": (4,)}, {"stage": 2}, "1 chunks with 4 layers, but there are 2 and 4"),
        ({"layers": (1, 3), "costs": "somewhere"}, {"stage": 2}, "so costs and stage_costs choose nothing"),
        ({"layers": (1, 3), "idle": "compute"}, {"stage": 2}, "but idle is compute"),
        ({"layers": (1, 3)}, {"stage": 2, "tensor": 2}, "but the mesh splits layers over tensor"),
        ({"stage_costs": (1.0,)}, {"stage": 2}, "stage_costs: 1 number for 2 stages"),
        ({"costs": "nowhere"}, {"stage": 2}, "costs: 'nowhere' has no measured costs of layers"),
    ],
)
def test_numbers_that_do_not_fit_are_an_error(options, sizes, message):
    made = case(decoder_loss, make_params(4), make_batch())
    with pytest.raises(InputError) as error:
        jax.eval_shape(made.pipelined(mesh_of(**sizes), schedule="1f1b", **options), made.params, *made.inputs)
    assert message in str(error.value)


def test_layers_are_chosen_from_measured_costs(tmp_path):
    (tmp_path / "profile").mkdir()
    rows = [{"layer": i, "stage": 0, "forward_ms": c, "backward_ms": c} for i, c in enumerate([3, 1, 1, 1])]
    (tmp_path / "profile" / "costs-0.json").write_text(json.dumps({"layers": rows}))
    pipeline = pipeline_of(schedule="1f1b", costs=str(tmp_path))
    assert pipeline.sizes(pipeline.table(2), 4) == (1, 3)
    assert jgt.Pipeline(signal="layers", microbatches=4, stage_costs=(3.0, 1.0)).sizes(pipeline.table(2), 4) == (1, 3)
    with pytest.raises(InputError, match="are of 4 layers, but the model has 5"):
        pipeline.sizes(pipeline.table(2), 5)
