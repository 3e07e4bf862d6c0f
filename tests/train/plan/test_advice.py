"""Advice: each saving against the arithmetic that it stands for."""

import dataclasses
from operator import attrgetter
from types import SimpleNamespace

import pytest

from jgt import Plan
from jgt.pipeline.config import PipelineConfig
from jgt.planner import Workload
from jgt.planner.hlo.collectives import Collective
from jgt.planner.memory import Memory
from train.config import load
from train.plan.advice import Adviser, Setting
from train.plan.make import settings_of

PIPELINE = Workload(pipeline=PipelineConfig(signal="layers", microbatches=8))
GB = 10**9
MEMORY = Memory(
    args_bytes=10 * GB,
    temp_bytes=30 * GB,
    peak_bytes=40 * GB,
    output_bytes=0,
    host_bytes=0,
    hbm_bytes=80 * GB,
    gradient_bytes=0,
    groups={"parameters": 5 * GB, "optimizer state": 20 * GB},
    activations={"layers/mlp": 24 * GB},
)


class Step(SimpleNamespace):
    """The fields of a plan that advice is computed from: a step of 100 ms that fits into half of 80 GB."""

    waiting_ms = Plan.waiting_ms

    def __init__(self, **changes):
        parts = {"parts_ms": {}, "exposed_ms": {}, "signals": (), "collectives": ()}
        super().__init__(**{"mesh": {"stage": 4}, "memory": MEMORY, "schedule": None, "step_time_ms": 100.0, **parts, **changes})


def advise(step, values, rows=4, work=PIPELINE):
    settings = {key: Setting(value=value, where="run.yaml:3") for key, value in values.items()}
    return Adviser(plan=step, settings=settings, rows=rows, work=work).advise()


def test_more_microbatches_shrink_the_bubble_and_not_the_work():
    step, values = Step(schedule=PIPELINE.schedule({"stage": 4}), parts_ms={"bubble": 27.0}), {"pipeline.microbatches": 8}
    (one,) = [a for a in advise(step, values) if a.key == "pipeline.microbatches"]
    # 3 idle ticks for 16 half microbatches take half of the time of 3 whole ones.
    assert one.saves_ms == pytest.approx(13.5)
    assert one.text.startswith("run.yaml:3: pipeline.microbatches: 16 instead of 8: the bubble falls from 27.3% to 15.8%")
    assert not [a for a in advise(step, values, rows=3) if "micro" in a.key]


def sent(dtype, num_bytes, axes=("data",), kind="all-reduce", signal=""):
    return Collective(kind=kind, dtype=dtype, bytes=num_bytes, count=1, axes=axes, signal=signal, phase="backward", source="", group=2)


def test_narrow_gradients_save_half_of_their_waiting():
    (one,) = advise(Step(collectives=(sent("f32", 300), sent("bf16", 100)), exposed_ms={"data": 40.0}), {"optimizer.gradients": None})
    assert one.key == "optimizer.gradients" and one.saves_ms == pytest.approx(40 * 0.75 / 2)
    assert not advise(Step(collectives=(sent("f32", 300),), exposed_ms={"data": 40.0}), {"optimizer.gradients": "bf16"})


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], {"model.dtype"}),
        (["model.dtype=bf16"], {"optimizer.gradients"}),
        (["model.dtype=bf16", "model.attention=xla"], {"optimizer.gradients", "model.attention"}),
        (["model.dtype=bf16", "optimizer.gradients=bf16", "train.accumulate=4"], {"train.accumulate"}),
    ],
)
def test_a_run_may_have_what_is_advised(overrides, keys):
    run = load("configs/quickstart.yaml", overrides)
    attention = SimpleNamespace(signal="layers/attn", rule="", roofline_ms={"memory": 9.0, "matmul": 2.0})
    collectives = (sent("f32", 300), sent("f32", 300, kind="all-gather") if keys == {"train.accumulate"} else sent("f32", 1))
    collectives = tuple(dataclasses.replace(c, count=4) for c in collectives)
    step = Step(signals=(attention,), collectives=collectives, exposed_ms={"data": 40.0}, parts_ms={"matmul": 50.0})
    settings = settings_of(run, "none")
    found = Adviser(plan=step, settings=settings, rows=4, work=PIPELINE).advise()
    assert {advice.key for advice in found} == keys
    for advice in found:
        value = advice.text.partition(f"{advice.key}: ")[2].split()[0]
        changed = load("configs/quickstart.yaml", [*overrides, f"{advice.key}={value}"])
        assert attrgetter(advice.key)(changed.config) != settings[advice.key].value


def test_a_step_that_does_not_fit_gets_advice_about_memory_only():
    values = {"train.accumulate": 1, "optimizer.offload": "none", "train.remat": "block"}
    step = Step(memory=dataclasses.replace(MEMORY, peak_bytes=90 * GB), parts_ms={"recompute": 50.0})
    offload, parts = sorted(advise(step, values, rows=8), key=lambda a: a.key)
    # 76 of 80 GB are usable: 14 are missing, of which halves of the batch save 12 and quarters 18.
    assert offload.saves_bytes == 20 * GB and "the step would fit" in offload.text
    assert parts.key == "train.accumulate" and parts.saves_bytes == 18 * GB and "4 instead of 1" in parts.text


def test_rings_save_the_waiting_of_tensor_parallelism_that_matmuls_can_hide():
    row = SimpleNamespace(signal="layers/mlp", rule="rules.yaml:7", roofline_ms={"matmul": 5.0})
    over = sent("bf16", 100, ("tensor",), "reduce-scatter", "layers/mlp")
    (one,) = advise(Step(signals=(row,), collectives=(over,), exposed_ms={"tensor": 8.0}), {})
    assert (one.key, one.where, one.saves_ms) == ("overlap", "rules.yaml:7", 5.0)
    assert (
        one.text
        == "rules.yaml:7: overlap: tensor for layers/mlp runs its collectives beside its matmuls, which saves up to 5.0 ms (5% of the step)"
    )


def test_a_model_that_is_too_small_for_its_devices_is_told_so():
    """By hand: 62 ms of launches and 20 ms of waiting leave 18 ms of work on each of 8 devices, 206 ms on one, in two digits 210."""
    step = Step(mesh={"data": 8}, parts_ms={"launch": 62.0, "matmul": 18.0}, exposed_ms={"data": 20.0})
    (advice,) = (a for a in advise(step, {}, work=Workload()) if a.key == "mesh")
    assert (
        "too small for 8 devices: 62% of the step are launches of kernels. One device takes about 210 ms instead of 100 ms" in advice.text
    )
    assert not advise(Step(mesh={"data": 8}, parts_ms={"launch": 40.0}), {}, work=Workload())
    assert not advise(Step(mesh={"data": 1}, parts_ms={"launch": 90.0}), {}, work=Workload())
