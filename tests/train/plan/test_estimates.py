"""Estimates: physics that every layout obeys, the same numbers whatever axes are called, and the order of plans of another model."""

from dataclasses import replace

import pytest
import yaml

from benchmarks.estimates import read_sample
from benchmarks.search import RUNS
from jgt.document import read
from jgt.pipeline.config import PipelineConfig
from jgt.planner.hardware.target import Target
from jgt.rules import Rules, load_rules, make_rules
from train.plan.search.columns import Columns
from train.plan.search.estimate import Estimator, Step, link_seconds
from train.plan.search.layout import Candidate, Roles

STEP = Step(flops=1e17, parameters=8e9, state_bytes=96e9, layer_bytes=2e9, layers=32, logits_bytes=4e9)
TARGET = Target.parse("h100:4x8")
OWN_NAMES = {"data": "rows", "fsdp": "dp", "tensor": "tp", "stage": "pp", "replica": "pods"}


def layout(rules, *mesh, remat="matmuls", accumulate=1, rows=1, **options):
    stages = PipelineConfig(signal="layers", microbatches=8, gather="layer") if "stage" in dict(mesh) else None
    roles = Roles.of(load_rules(f"jgt:{rules}"), "stage")
    one = Candidate(mesh=mesh, rules=f"jgt:{rules}", roles=roles, accumulate=accumulate, rows=rows, remat=remat, stages=stages)
    return replace(one, **options)


def figures(*space, step=STEP):
    estimator = Estimator(step, TARGET, space)
    return [(estimator.estimate(index).seconds, estimator.estimate(index).peak_bytes) for index in range(len(space))]


LAYOUTS = [
    layout("fsdp", ("fsdp", 32)),
    layout("zero1", ("data", 32)),
    layout("hybrid", ("replica", 4), ("fsdp", 8), accumulate=4),
    layout("fsdp_tensor", ("data", 2), ("fsdp", 4), ("tensor", 4)),
    layout("fsdp_tensor", ("data", 1), ("fsdp", 1), ("tensor", 32)),
    layout("fsdp_sequence", ("data", 2), ("fsdp", 4), ("tensor", 4), rows=4),
    layout("overlap", ("data", 1), ("fsdp", 8), ("tensor", 4)),
    layout("pipeline", ("data", 1), ("fsdp", 4), ("stage", 4), ("tensor", 2)),
]


def renamed(value):
    """A rules file's contents with other axes."""
    if isinstance(value, dict):
        return {key: renamed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one) for one in value]
    return OWN_NAMES.get(value, value)


@pytest.mark.parametrize("one", LAYOUTS, ids=lambda one: one.text)
def test_names_of_axes_and_files_change_no_byte(one):
    document = read(one.rules, Rules.FOLDER).plain()
    own = replace(
        one,
        mesh=tuple((OWN_NAMES[axis], size) for axis, size in one.mesh),
        rules=None,
        roles=Roles.of(make_rules(renamed(document)), "pp"),
        stages=one.stages and replace(one.stages, axis="pp"),
    )
    assert own.roles != one.roles
    assert figures(own) == figures(one)


def test_rules_that_say_the_same_have_the_same_estimate():
    one = layout("fsdp", ("fsdp", 32))
    assert figures(layout("fsdp_tensor", ("data", 1), ("fsdp", 32), ("tensor", 1))) == figures(one)
    assert figures(layout("overlap", ("data", 1), ("fsdp", 32), ("tensor", 1))) == figures(one)
    assert figures(layout("tensor", ("data", 8), ("tensor", 4))) == figures(layout("fsdp_tensor", ("data", 8), ("fsdp", 1), ("tensor", 4)))


def test_a_row_of_128k_tokens_fits_where_devices_share_it():
    # Llama 3 8B on one node, by the figures of its plan.
    step = replace(STEP, flops=3.8e16, layer_bytes=35e9, logits_bytes=6.7e10, keys=0.25)
    node, limit = Target.parse("h100:1x8"), 80e9
    space = [
        layout("fsdp_tensor", ("data", 1), ("fsdp", 1), ("tensor", 8), remat="block"),
        *(layout("context", ("data", 1), ("fsdp", 1), ("seq", n), ("tensor", 8 // n), remat="block") for n in (2, 4, 8)),
    ]
    estimates = [Estimator(step, node, space).estimate(n) for n in range(4)]
    assert all(one.peak_bytes < limit for one in estimates[1:])
    assert min(estimates, key=lambda one: one.seconds) is min(estimates, key=lambda one: one.peak_bytes) is estimates[3]


def test_what_is_split_over_more_devices_takes_less_memory():
    (_, whole), (_, half), (_, all_of_it) = figures(
        layout("replicated", ("data", 32)), layout("hybrid", ("replica", 4), ("fsdp", 8)), layout("fsdp", ("fsdp", 32))
    )
    assert whole > half > all_of_it
    none, matmuls, block = (figures(layout("fsdp", ("fsdp", 32), remat=remat))[0] for remat in ("none", "matmuls", "block"))
    assert none[1] > matmuls[1] > block[1]
    assert none[0] < block[0]


def test_frozen_parameters_have_no_gradients():
    frozen = replace(STEP, trained=0.0)
    for one, gradients in zip(LAYOUTS[:3], (8e9 * 4 / 32, 8e9 * 8, 8e9 * 8 / 8), strict=True):
        (seconds, peak), (fewer, less) = figures(one)[0], figures(one, step=frozen)[0]
        assert peak - less == pytest.approx(gradients)
        assert fewer < seconds
    replicated = layout("replicated", ("data", 32))
    assert float(link_seconds(frozen, TARGET, [replicated], Columns([replicated], 32))["sums"][0]) < 1e-3


def test_a_ring_over_hosts_uses_one_port_of_a_host():
    def tensor(rules, size):
        one = layout(rules, ("data", 32 // size), ("fsdp", 1), ("tensor", size))
        return float(link_seconds(STEP, TARGET, [one], Columns([one], 32))["tensor"][0])

    assert tensor("overlap", 32) > 4 * tensor("fsdp_sequence", 32)
    assert tensor("overlap", 8) < 2 * tensor("fsdp_sequence", 8)


def test_stages_of_different_depths_wait_for_the_deepest():
    pipelines = [layout("pipeline", ("stage", stages)) for stages in (12, 16)]
    # 36 layers in 16 stages: some have 3, and 2.25 are the mean.
    assert Columns(pipelines, 36).uneven.tolist() == [1.0, 48 / 36]
    assert Columns(pipelines, None).uneven.tolist() == [1.0, 1.0]


def test_estimates_order_the_plans_of_a_model_that_no_constant_was_chosen_for():
    """The constants were chosen before these plans were made."""
    row = "maxtext-7B-1x8"
    sample = read_sample(row, yaml.safe_load(RUNS.read_text())[row])
    found = sample.figures(sample.estimator(), near=False)
    assert found["layouts"] >= 10
    assert found["kendall"] >= 0.5
    assert found["top_14"] <= 1.02
