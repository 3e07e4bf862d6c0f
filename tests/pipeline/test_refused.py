"""Pipelines that cannot work are refused, with a message that says what to do instead."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from models import RULES, case, decoded, decoder_loss, embed, loss_of, make_batch, make_params, mesh_of, nats, pipeline_of, run_layers

import jgt

SIZES = {"stage": 2, "tensor": 2, "data": 2}


def ask(loss=decoder_loss, *, mesh=None, rules=RULES, num_layers=4, inputs=None, derivative=lambda fn: fn, **options):
    """The shapes of a pipelined loss, or of a derivative of it; nothing is compiled."""
    pipelined = jgt.shard(loss, jgt.make_rules(rules), mesh or mesh_of(**SIZES), pipeline=pipeline_of(**options))
    return jax.eval_shape(derivative(pipelined), make_params(num_layers), *(inputs or (make_batch(),)))


def test_what_is_asked_here_is_possible():
    assert ask().shape == ()
    assert jax.tree.map(jnp.shape, ask(derivative=jax.grad)) == jax.tree.map(jnp.shape, make_params(4))


def rules_with(**signals):
    return RULES | {"signals": RULES["signals"] | signals}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signal": "layer"}, "pipeline: signal: no signal of the program is 'layer'. Layer scans are under: 'layers'"),
        ({"signal": "head"}, "pipeline: signal: the signal 'head' contains no layer scan"),
        ({"axis": "stages"}, "pipeline: axis: the mesh has no axis 'stages'. Did you mean 'stage'?"),
        (
            {"microbatches": 3},
            "3 microbatches do not divide the batch of 16 (8 on each of 2 data shards). These divide it: 1, 2, 4, 8",
        ),
        ({"microbatches": 0}, "microbatches must be at least 1, not 0"),
        ({"schedule": "interleave"}, "there is no schedule 'interleave'. Did you mean 'interleaved'?"),
        (
            {"idle": "skip"},
            "pipeline: idle: stages can skip layers only if each device computes its layers alone, but the mesh splits them over tensor",
        ),
        ({"num_layers": 1}, "'layers' has 1 layer, too few for 2 stages. Make stage or virtual smaller"),
        ({"rules": RULES | {"inputs": {"**": ["stage", "..."]}}}, "the inputs are sharded over stage"),
        (
            {"rules": RULES | {"inputs": {"tokens": [None, "batch"], "**": ["batch", "..."]}}},
            "the batch must be the first dim in a pipeline",
        ),
        (
            {"rules": rules_with(**{"layers/mlp": {"params": {"up": [None, "stage"]}}})},
            "up: the parameter layers/up lies in the pipeline of 'layers'",
        ),
        ({"rules": rules_with(**{"layers/mlp": {"tensors": {"hidden": ["batch", None, "stage"]}}})}, "which has the axis stage for itself"),
        ({"rules": rules_with(**{"layers/mlp": {"save": {"hidden": "offload"}}})}, "offload is not possible inside a pipeline"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", " ", value)[:40],
)
def test_sections_and_rules(options, message):
    with pytest.raises(jgt.InputError, match=re.escape(message)):
        ask(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "full"}, "none, layer, stage"),
        ({"gather": "never"}, "step, layer"),
        ({"idle": "sleep"}, "compute, skip, None"),
        ({"per_microbatch": "moe"}, r"\('moe',\)"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        pipeline_of(**options)


def test_the_stage_axis_comes_after_those_of_the_batch():
    early = jgt.make_mesh({"stage": 2, "data": 2, "fsdp": 1, "tensor": 2})
    with pytest.raises(jgt.InputError, match="in the mesh stage must come after data"):
        ask(mesh=early)
    # The same devices for the same parts.
    late = jgt.make_mesh({"stage": 2, "data": 2, "fsdp": 1, "tensor": 2}, axis_names=("data", "fsdp", "stage", "tensor"))
    assert late.devices.shape == (2, 1, 2, 2)
    assert late.devices[1, 0, 0, 1] == early.devices[0, 1, 0, 1]
    ask(mesh=late)


def two_scans(params, batch):
    x = run_layers(params, run_layers(params, embed(params, batch)))
    return loss_of(params, x, batch)


def in_a_loop(params, batch):
    x = jax.lax.fori_loop(0, 2, lambda _, x: run_layers(params, x), embed(params, batch))
    return loss_of(params, x, batch)


def without_layers(params, batch):
    x = run_layers(params, embed(params, batch))
    return jnp.sum(params["unembed"] ** 2) + 0 * batch["weights"].sum(), x.shape[0]


def times_rows(params, batch):
    losses = nats(decoded(params, batch), batch)
    return jnp.sum(losses * losses.shape[0])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (times_rows, "cannot be added up from microbatches: it grows like the batch to the power of 2"),
        (two_scans, r"the signal 'layers' contains 2 scans of 4 layers.*jax.tree.map\(lambda a: jnp.concatenate\(\[a, a\]\), stack\)"),
        (in_a_loop, "the layer scan under 'layers' is in a loop or a branch.* scan once over their stack repeated"),
        (without_layers, "no result of the function depends on its layers"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_functions(loss, message):
    with pytest.raises(jgt.InputError, match=message):
        ask(loss)


def rows_only(params, batch):
    return nats(decoded(params, batch), batch)


def test_a_row_for_each_sequence():
    with pytest.raises(jgt.InputError, match="result 0 of the function has a row for each sequence of the batch"):
        ask(rows_only)


def ratio_of_sums(params, batch):
    losses = nats(decoded(params, batch), batch)
    return jnp.sum(losses * batch["weights"]) / jnp.sum(losses)


def perplexity(loss, params, batch):
    return jnp.exp(loss)


def clipped(loss, params, batch):
    return jnp.clip(2 * loss, 0.0, 1e3)


def logarithm(loss, params, batch):
    return jnp.log(loss)


def mean_of_the_hard(params, batch):
    losses = nats(decoded(params, batch), batch)
    hard = losses > 3
    return jnp.sum(jnp.where(hard, losses, 0)) / jnp.maximum(jnp.sum(hard), 1)


OF_ROWS = (ratio_of_sums, mean_of_the_hard)


@pytest.mark.parametrize("function", [perplexity, clipped, logarithm, *OF_ROWS], ids=lambda fn: fn.__name__)
def test_a_gradient_needs_a_loss_that_is_linear_in_its_sums(function):
    def loss(params, batch):
        return function(params, batch) if function in OF_ROWS else function(decoder_loss(params, batch), params, batch)

    ask(loss)  # Forward, it may be any function of sums.
    with pytest.raises(jgt.InputError, match="the loss is not linear in what it sums up over the batch") as caught:
        ask(loss, derivative=jax.grad)
    (problem,) = caught.value.problems
    first, length = function.__code__.co_firstlineno, len(inspect.getsource(function).splitlines())
    line = re.match(r"pipeline: signal: .*test_refused\.py:(\d+)", problem)
    assert line and first < int(line[1]) < first + length, problem


def test_a_gradient_is_that_of_the_first_result():
    def with_other(params, batch):
        loss = decoder_loss(params, batch)
        return loss, 2 * loss

    with pytest.raises(ValueError, match="through its first result only"):
        ask(with_other, derivative=lambda fn: jax.grad(lambda *args: fn(*args)[1]))


def test_a_gradient_is_by_the_parameters():
    by_weights = make_batch()
    with pytest.raises(ValueError, match="only by its first argument, the parameters"):
        ask(
            derivative=lambda fn: lambda params, batch: jax.grad(lambda w: fn(params, batch | {"weights": w}))(batch["weights"]),
            inputs=(by_weights,),
        )


def test_a_batch_that_is_none():
    constant = case(lambda params, scale: scale * decoder_loss(params, make_batch()), None, jnp.float32(2))
    with pytest.raises(jgt.InputError, match="the function has no batch to split"):
        jax.eval_shape(constant.pipelined(mesh_of(**SIZES)), constant.params, *constant.inputs)


def test_an_input_that_is_no_batch_but_as_long():
    """Positions of a sequence that is as long as the batch has rows. The rule [] says that they are not the batch."""
    batch = make_batch(4)  # as many rows as tokens

    def positioned(params, batch):
        x = embed(params, batch) * (1 + batch["scale"][None, :, None])
        return loss_of(params, run_layers(params, x), batch)

    inputs = (batch | {"scale": jnp.arange(4.0)},)
    with pytest.raises(jgt.InputError, match=r"If one of them is not the batch, give it the rule \[\] under inputs:"):
        ask(positioned, inputs=inputs, microbatches=2, mesh=mesh_of(stage=2))
    ask(positioned, inputs=inputs, microbatches=2, mesh=mesh_of(stage=2), rules=RULES | {"inputs": {"scale": [], "**": ["batch", "..."]}})
