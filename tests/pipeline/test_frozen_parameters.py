"""Parameters that a call does not differentiate by cost a pipeline no gradients, and change nothing of the others'."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    EMBED,
    LAYERS,
    RULES,
    VOCAB,
    assert_close,
    case,
    compiled,
    embed,
    loss_of,
    make_batch,
    make_params,
    mesh_of,
    pipeline_of,
    run_layers,
)

import jgt
from jgt.planner.flops import flops
from jgt.program import jaxpr as jx
from jgt.program.dataflow import live
from jgt.program.equations import is_scan, scan_sizes, subprograms
from jgt.schedule.schedules import SCHEDULES
from jgt.signal import context, tensor

TRAINED = {
    "norms": ("scale",),
    "shift": ("shift",),
    "part": ("layers/down", "unembed"),
    "layers": ("layers/up", "layers/down", "scale", "shift"),
    "embedding": ("embed",),
    "head": ("unembed",),
    "ends": ("embed", "unembed"),
}
"""The parameters that are trained. `scale` is one for each layer, and `shift` the same for all of them."""


def scaled(params, batch):
    """The loss of a decoder whose layers read a scale of their own, and a shift that is the same for all."""

    def layer(x, own):
        weights, scale = own
        with context("mlp"):
            return x + tensor(jnp.tanh((x * scale + params["shift"]) @ weights["up"]), "hidden") @ weights["down"]

    stacks = {"layers": (params["layers"], params["scale"])}
    return loss_of(params, run_layers(stacks, embed(params, batch), layer), batch)


def by_path(tree):
    return {jgt.path_text(path): x for path, x in jax.tree.leaves_with_path(tree)}


def derivative(loss, params, trained):
    """A function to the loss and its gradients by the parameters with these paths, and its arguments: these, all others, and the batch."""
    tree, whole = jax.tree.structure(params), by_path(params)

    def of_trained(own, others, batch):
        return loss(jax.tree.unflatten(tree, [(own | others)[path] for path in whole]), batch)

    own = {path: whole[path] for path in trained}
    return jax.value_and_grad(of_trained), own, {path: x for path, x in whole.items() if path not in own}


def results(case, loss, trained):
    gradient, *params = derivative(loss, case.params, trained)
    return compiled(gradient)(*params, *case.inputs)


@pytest.fixture(scope="module")
def frozen_case():
    rng = np.random.default_rng(2)
    more = {"scale": rng.normal(1, 0.1, (LAYERS, 1, 1, EMBED)), "shift": rng.normal(0, 0.1, (1, 1, EMBED))}
    params = make_params() | {name: x.astype(np.float32) for name, x in more.items()}
    return case(scaled, params, make_batch())


def grid():
    """Every schedule on several meshes, with everything that is recomputed or summed in another way. One case is not slow."""
    for schedule, (sizes, options, parts) in itertools.product(
        SCHEDULES,
        [
            ({"stage": 2}, {}, 1),
            ({"stage": 2}, {"idle": "compute", "remat": "stage"}, 1),
            ({"stage": 2, "tensor": 2, "data": 2}, {}, 1),
            ({"stage": 2, "fsdp": 2, "tensor": 2}, {"remat": "stage", "gather": "layer"}, 1),
            ({"stage": 2, "data": 2, "fsdp": 2}, {"remat": "layer", "microbatches": 2}, 2),
        ],
    ):
        quick = schedule == "zb" and sizes == {"stage": 2} and not options
        names = ("norms",) if quick else tuple(TRAINED)
        marks = () if quick else pytest.mark.slow
        identity = "-".join([schedule, *map(str, [*sizes, *options.values()])])
        yield pytest.param(sizes, {"schedule": schedule} | options, parts, names, id=identity, marks=marks)
        if quick:
            yield pytest.param(sizes, {"schedule": schedule}, parts, tuple(TRAINED), id=f"{identity}-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("sizes", "options", "parts", "names"), list(grid()))
def test_the_gradients_of_trained_parameters_are_those_of_training_all(frozen_case, sizes, options, parts, names):
    mesh, pipeline = mesh_of(**sizes), pipeline_of(**options).in_parts(parts)
    loss = jgt.shard(scaled, jgt.make_rules(RULES), mesh, pipeline=pipeline)
    paths = tuple(by_path(frozen_case.params))
    value, gradients = results(frozen_case, loss, paths)
    expected = by_path(frozen_case.expected[1])
    for name in names:
        found, some = results(frozen_case, loss, TRAINED[name])
        np.testing.assert_allclose(found, value, rtol=1e-6)
        assert_close(some, {path: gradients[path] for path in TRAINED[name]}, 1e-6)
        assert_close(some, {path: expected[path] for path in TRAINED[name]}, 1e-5)


WIDE, FFN = 64, 256
LAYER = ("layers/up", "layers/down")


def large(schedule, trained):
    """A derivative in a pipeline whose weights are much larger than its activations, with its arguments."""
    shapes = {
        "embed": (VOCAB, WIDE),
        "layers": {"up": (LAYERS, WIDE, FFN), "down": (LAYERS, FFN, WIDE)},
        "unembed": (VOCAB, WIDE),
        "scale": (LAYERS, 1, 1, WIDE),
        "shift": (1, 1, WIDE),
    }
    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    loss = jgt.shard(scaled, jgt.make_rules(RULES), mesh_of(stage=2), pipeline=pipeline_of(schedule=schedule))
    gradient, *some = derivative(loss, params, trained)
    return gradient, *some, make_batch()


def traced(schedule, trained):
    """The FLOPs of the program, and the last two dims of the weights' size that its loops carry."""
    fn, *arguments = large(schedule, trained)
    program = jax.make_jaxpr(fn)(*arguments)
    return sum(one.executed for one in flops(live(program))), {shape[-2:] for shape in carried(program)} & {(WIDE, FFN), (FFN, WIDE)}


def carried(program):
    """The shapes of all values that scans carry from step to step."""
    for equation in jx.body(program).eqns:
        if is_scan(equation):
            num_consts, num_carry = scan_sizes(equation)
            yield from (jx.shape_of(atom) for atom in equation.invars[num_consts : num_consts + num_carry])
        for inner in subprograms(equation):
            yield from carried(inner)


@pytest.mark.parametrize("schedule", [pytest.param(schedule, marks=() if schedule == "zb" else pytest.mark.slow) for schedule in SCHEDULES])
def test_a_frozen_weight_costs_no_matmul_and_no_sum(schedule):
    (whole, sums), (norms, no_sums) = traced(schedule, (*LAYER, "scale")), traced(schedule, ("scale",))
    # Weight gradients are a third. In ticks without a microbatch zb computes forward and backward items in vain, but few of weights.
    assert norms <= (0.72 if schedule.startswith("zb") else 0.67) * whole
    assert len(sums) == 2
    assert not no_sums


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_run_backward_only_if_something_before_the_head_is_trained(schedule):
    head, embedding, layers = (traced(schedule, trained)[0] for trained in (("unembed",), ("embed",), LAYER))
    assert head <= 0.36 * layers
    assert embedding <= 0.72 * layers


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb"])
def test_memory_falls_by_the_sums_of_gradients(schedule):
    whole, norms = (jgt.plan(*large(schedule, trained)).memory.temp_bytes for trained in ((*LAYER, "scale"), ("scale",)))
    # A stage has half of the layers.
    assert whole - norms >= LAYERS * 2 * WIDE * FFN * 4 / 2
