"""Over which groups of devices a batch is split."""

from pathlib import Path

import pytest
from plugin import needs_plugin

from jgt.planner.described import devices_of
from jgt.planner.hardware.target import Target
from train.config import load
from train.setup.layout import mesh_layout

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
FSDP = ("mesh={data: 2, fsdp: 4, tensor: 1}",)
PIPELINE = ("rules=rules/pipeline.yaml", "mesh={data: 2, fsdp: 2, stage: 2, tensor: 1}", "pipeline={signal: layers, microbatches: 2}")


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "elsewhere"),
    [(FSDP, (8,), (2, 4)), (PIPELINE, (), ()), (("mesh={data: 1, fsdp: 4, tensor: 2}",), (4,), (4,))],
)
def test_groups_are_those_of_the_mesh_and_on_cpus_one(overrides, on_cpu, elsewhere):
    run = load(QUICKSTART, overrides)
    assert mesh_layout(run).groups == on_cpu
    assert mesh_layout(run, num_devices=8).groups == elsewhere


@needs_plugin
def test_groups_on_described_gpus_are_those_of_the_mesh():
    run = load(QUICKSTART, FSDP)
    assert mesh_layout(run, devices=devices_of(Target.parse("h100:1x8"))).groups == (2, 4)


def test_a_mesh_of_one_device_has_no_groups():
    run = load(QUICKSTART, ("mesh={data: 1, fsdp: 1, tensor: 1}", "devices.virtual_cpu=1"))
    assert mesh_layout(run, num_devices=1).groups == ()
