"""`jgt calibrate`: figures follow from the times of kernels, are written as a chip file, and make plans for CPU devices."""

import json
from dataclasses import replace

import jax
import pytest

from jgt.document import InputError
from jgt.planner.hardware.chip import Link, load_chip, read_chip
from jgt.planner.hardware.rates import MatmulWork
from jgt.planner.hardware.target import Target
from train.plan.__main__ import main as plan
from train.plan.calibrate import __main__ as command
from train.plan.calibrate.figures import calibrated, chip_text
from train.plan.calibrate.kernels import GPU_SIZES, Sizes, kernels, measure

TINY = Sizes(matmuls={"f32": 32, "bf16": 16}, memory=1 << 10, sent=(1 << 10, 1 << 12), launches=3, flops=1e5, num_bytes=1e4)
MODEL = {"kind": "gpt", "layers": 2, "embed": 32, "heads": 2, "vocab": 64, "seq": 16}


def seconds_on(chip, sizes, devices):
    """What the programs would take on a chip."""
    network = Target(chip=chip, text="", num_hosts=1, per_host=devices).network([0] * devices)
    group, ring = (tuple(range(devices)),), tuple((i, (i + 1) % devices) for i in range(devices))
    found = {f"matmul {dtype}": chip.matmul_seconds(MatmulWork(dtype, 1, n, n, n)) for dtype, n in sizes.matmuls.items()}
    found |= {"memory": chip.memory_seconds(8 * sizes.memory), "launch": chip.rates.launch_us * 1e-6}
    for which, num_bytes in zip(("small", "large"), sizes.sent, strict=True):
        found[f"{which} all-gather"] = network.seconds(group, num_bytes * (devices - 1) // devices)
        found[f"{which} collective-permute"] = network.seconds(ring, num_bytes, "collective-permute")
    return found


@pytest.mark.parametrize("devices", [2, 8])
def test_figures_are_found_again(devices):
    start = Target.of_devices("cpu", devices).chip
    link = Link(gbs=3.0, domain="all", share=1.0, start_us=70.0, hop_us=2.0)
    known = replace(start, hbm_gbs=2.0, tflops={"tf32": 0.02, "bf16": 0.03}, links={"memory": link})
    found = calibrated(start, GPU_SIZES, seconds_on(known, GPU_SIZES, devices), devices)
    assert found.tflops == pytest.approx(known.tflops)
    assert found.hbm_gbs == pytest.approx(2.0, rel=1e-3)
    assert found.links["memory"].gbs == pytest.approx(3.0, rel=1e-2)
    if devices > 2:
        assert (found.links["memory"].start_us, found.links["memory"].hop_us) == pytest.approx((70.0, 2.0), rel=0.1)


def test_with_a_data_sheet_shares_of_its_peaks_are_found():
    start = load_chip("h100")
    rates = replace(start.rates, memory=replace(start.rates.memory, share=0.5), launch_us=9.0)
    rates = replace(rates, matmul={**rates.matmul, "bf16": replace(rates.matmul["bf16"], share=0.4)})
    known = replace(start, rates=rates)
    found = calibrated(start, GPU_SIZES, seconds_on(known, GPU_SIZES, 8), 8)
    assert found.rates.matmul["bf16"].share == pytest.approx(0.4, rel=1e-3)
    assert found.rates.memory.share == pytest.approx(0.5, rel=1e-3)
    assert found.rates.launch_us == pytest.approx(9.0)
    # The network between hosts, and the peaks, are not measured.
    assert found.links["nic"] == start.links["nic"]
    assert found.tflops == start.tflops


def test_kernels_are_run_in_rounds_and_written(tmp_path):
    said = []
    seconds = measure(kernels(jax.devices(), TINY), said.append)
    assert len(said) == 3 * len(seconds)
    assert all(one > 0 for one in seconds.values())
    path = tmp_path / "cpu.yaml"
    found = calibrated(Target.of_devices("cpu", 8).chip, TINY, seconds, 8)
    path.write_text(chip_text(found, seconds, 8))
    assert "matmul f32" in path.read_text()
    again = read_chip(path)
    assert again.devices == 8
    assert again.hbm_gbs == pytest.approx(found.hbm_gbs, rel=1e-2)


@pytest.mark.slow
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
        Target.parse("cpu:1x4", str(chip))


def test_a_cpu_without_figures_is_refused_with_the_command():
    with pytest.raises(InputError, match=r"no figures of this machine's processor. Measure it with jgt calibrate, and add --chip cpu.yaml"):
        Target.parse("cpu:1x8")


def test_a_name_that_is_not_a_chip_file_is_refused(capsys, tmp_path):
    assert command.main(["--write", str(tmp_path / "cpu.txt")]) == 2
    assert "must end with .yaml" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-3", "9999999999"])
def test_a_number_of_devices_that_cannot_be_is_refused(count, capsys):
    assert command.main([f"--devices={count}"]) == 2
    assert "--devices: must be a whole number from 1 to" in capsys.readouterr().err


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
