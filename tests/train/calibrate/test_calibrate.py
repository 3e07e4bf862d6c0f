"""`jgt calibrate`: figures are fitted to times, written as a chip file, and make plans for CPU devices."""

import dataclasses
import json

import jax
import pytest

from jgt.document import InputError
from jgt.hardware.chip import parse_target, read_chip
from train.calibrate import __main__ as command
from train.calibrate.figures import calibrate, starting_chip
from train.calibrate.fit import Fit, Prior
from train.calibrate.kernels import Sizes, kernels
from train.calibrate.measured import ROUNDS, Measured, measure
from train.calibrate.steps import StepLayout, layouts, step_of
from train.plan.__main__ import main as plan

TINY = Sizes(
    matmuls={"float32": ((1, 32, 32, 32),)}, attention=(), memory=(1 << 10,), sent=(1 << 10,), launches=3, flops=1e5, num_bytes=1e4
)
MODEL = {"kind": "gpt", "layers": 2, "embed": 32, "heads": 2, "vocab": 64, "seq": 16}


@pytest.fixture(scope="module")
def programs():
    """A program of each kind for 8 CPU devices."""
    sections = {"model": MODEL, **StepLayout(name="fsdp", sizes={"fsdp": 8}, rules="fsdp").document}
    return [*kernels(jax.devices(), TINY), step_of("gpt, fsdp", sections, jax.devices())]


def test_figures_are_found_again():
    def predict(program, figures):
        work, traffic = program
        return work / figures["speed"] + traffic / figures["width"]

    true = {"speed": 300.0, "width": 7.0}
    programs = [(1.0, 0.01), (1.0, 1.0), (0.01, 1.0), (5.0, 2.0)]
    fit = Fit(
        predict,
        {program: predict(program, true) for program in programs},
        {name: Prior(value=20.0, width=3.0, why="") for name in true},
        dict.fromkeys(programs, 0.05),
        looks=6,
    )
    assert fit.of(programs) == pytest.approx(true, rel=0.03)


def test_a_chip_is_fitted_to_programs_and_written(programs, tmp_path):
    start = starting_chip(jax.devices()[0], 8)
    known = dataclasses.replace(start, hbm_gbs=2.0, fresh_gbs=0.3, tflops={"tf32": 0.02, "bf16": 0.02})
    measured = [Measured(program, [0.0]) for program in programs]
    measured = [Measured(program, [9.0, one.predicted(known)]) for program, one in zip(programs, measured, strict=True)]
    found = calibrate(start, measured)
    for one in measured:
        assert one.predicted(found.chip) == pytest.approx(one.seconds, rel=0.1)
    path = tmp_path / "cpu.yaml"
    path.write_text(command.chip_text(measured, found, jax.devices()))
    again = read_chip(path)
    assert again.devices == 8
    assert again.hbm_gbs == pytest.approx(found.chip.hbm_gbs, rel=1e-2)
    assert "step: gpt, fsdp" in path.read_text()


def test_programs_are_run_in_rounds(programs):
    said = []
    measured = measure(programs[:2], said.append)
    assert [len(one.rounds) for one in measured] == [ROUNDS, ROUNDS]
    assert all(one.seconds == min(one.rounds) > 0 for one in measured)
    assert [line.split("round ")[1][0] for line in said] == ["1", "1", "2", "2", "3", "3", "4", "4"]


def test_every_number_of_devices_has_layouts():
    for devices in range(1, 17):
        found = list(layouts(devices))
        assert found
        for layout in found:
            product = 1
            for size in layout.sizes.values():
                product *= size
            assert product == devices
            assert layout.document["train"]["batch"] == layout.rows * devices


def test_a_plan_for_cpu_devices_has_times(tmp_path, capsys):
    chip = tmp_path / "cpu.yaml"
    chip.write_text(CHIP)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": MODEL, "mesh": {"fsdp": 8}, "rules": "jgt:fsdp", "train": {"steps": 1, "batch": 16}}))
    assert plan([str(file), "--target", "cpu:1x8", "--chip", str(chip), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "cpu:1x8"
    assert sum(found["parts_ms"].values()) == pytest.approx(found["step_time_ms"], rel=1e-4)
    assert sum(row["compute_ms"] + row["exposed_ms"] for row in found["signals"]) == pytest.approx(found["step_time_ms"], rel=1e-3)
    assert found["memory"]["fits"]


def test_figures_of_another_number_of_devices_are_refused(tmp_path):
    chip = tmp_path / "cpu.yaml"
    chip.write_text(CHIP)
    with pytest.raises(InputError, match=r"figures are of 8 devices that share a processor, and the target has 4.*calibrate --devices 4"):
        parse_target("cpu:1x4", str(chip))


def test_a_cpu_without_figures_is_refused_with_the_command():
    with pytest.raises(InputError, match=r"no figures of this machine's processor. Measure it with jgt calibrate, and add --chip cpu.yaml"):
        parse_target("cpu:1x8")


def test_a_name_that_is_not_a_chip_file_is_refused(capsys, tmp_path):
    assert command.main(["--write", str(tmp_path / "cpu.txt")]) == 2
    assert "must end with .yaml" in capsys.readouterr().err


CHIP = """
name: cpu
platform: cpu
devices: 8
tflops: {tf32: 0.05, bf16: 0.02}
hbm_gb: 3
hbm_gbs: 6
host_gbs: 5
fresh_gbs: 0.7
rates:
  matmul: {tf32: {share: 1, edge: 9, depth: 10, area: 800}, bf16: {share: 1}}
  attention: {forward: 1, backward: 1}
  memory: {share: 1, half_mb: 0.003}
  launch_us: 1
links: {memory: {gbs: 6, domain: all, share: 1, start_us: 90, hop_us: 3}}
error: {one_host: 0.2}
"""
