"""The share of its peaks that a chip reaches: it grows with the size of the work, and never exceeds the share of large work."""

import dataclasses
import itertools

import pytest

from jgt.document import InputError
from jgt.planner.hardware.chip import chip_names, chip_of, load_chip
from jgt.planner.hardware.rates import AttentionRate, AttentionWork, MatmulRate, MatmulWork
from jgt.planner.hardware.target import Target

H100 = load_chip("h100")
LARGE = MatmulWork("bf16", 1, 16384, 16384, 16384)


def rate(chip, work):
    return work.flops / chip.matmul_seconds(work)


@pytest.mark.parametrize("dim", ["batch", "m", "n", "k"])
def test_larger_matmuls_are_faster_until_they_reach_the_share(dim):
    rates = [rate(H100, MatmulWork("bf16", 4, 256, 256, 256)._replace(**{dim: size})) for size in (64, 256, 1024, 4096)]
    assert all(a < b for a, b in itertools.pairwise(rates))
    share = H100.rates.matmul["bf16"].share
    assert 0.95 * share * 989e12 < rate(H100, LARGE) < share * 989e12


def test_at_the_half_sizes_half_of_the_rate_is_left():
    assert MatmulRate(share=0.8, depth=64).of(MatmulWork("bf16", 1, 8, 8, 64)) == pytest.approx(0.4)
    assert MatmulRate(share=0.8, edge=8).of(MatmulWork("bf16", 1, 8, 8, 64)) == pytest.approx(0.2)
    assert MatmulRate(share=0.8, area=128).of(MatmulWork("bf16", 2, 8, 8, 64)) == pytest.approx(0.4)
    attention = AttentionRate(forward=0.6, backward=0.4, head=128, length=1024)
    assert attention.of(AttentionWork(1, 1024, 128, is_backward=False)) == pytest.approx(0.15)
    assert attention.of(AttentionWork(1, 1024, 128, is_backward=True)) == pytest.approx(0.1)


def test_types_have_rates_of_their_own_or_those_of_bf16():
    assert rate(H100, LARGE._replace(dtype="f8e4m3fn")) > 1.5 * rate(H100, LARGE)
    assert rate(H100, LARGE._replace(dtype="f32")) == pytest.approx(rate(H100, LARGE) * 494 / 989)
    assert rate(load_chip("a100"), LARGE._replace(dtype="f8e5m2")) == pytest.approx(rate(load_chip("a100"), LARGE))


def test_less_power_is_a_lower_clock_for_cores_and_not_for_memory():
    limited = dataclasses.replace(H100, power_w=H100.rated_w / 4)
    assert rate(limited, LARGE) == pytest.approx(rate(H100, LARGE) / 2)
    assert limited.memory_seconds(10**9) == H100.memory_seconds(10**9)


def test_short_transfers_do_not_fill_the_memorys_pipeline():
    half = int(H100.rates.memory.half_mb * 1e6)
    assert H100.memory_seconds(0) == 0
    assert H100.memory_seconds(half) == pytest.approx(2 * half / (H100.hbm_gbs * 1e9 * H100.rates.memory.share))


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_file_is_complete(name):
    chip = load_chip(name)
    assert set(chip.error) == {"one_host", "several_hosts", "pipeline"}
    assert set(chip.rates.matmul) <= set(chip.tflops) and "bf16" in chip.rates.matmul
    *inner, outermost = chip.links.values()
    assert outermost.domain == "all" and all(link.domain != "all" for link in inner)
    assert chip_of(chip.name) is chip
    assert Target.parse(f"{name}:2x8").text == f"{name}:2x8"


def test_a_kind_of_device_is_found_by_its_name():
    assert chip_of("NVIDIA H100 80GB HBM3") is H100
    assert chip_of("NVIDIA GB200") is load_chip("gb200")
    assert chip_of("NVIDIA B200") is load_chip("b200")
    assert chip_of("NVIDIA A100-SXM4-40GB") is load_chip("a100-40gb")
    assert chip_of("NVIDIA GeForce RTX 4090 D") is load_chip("rtx4090")
    assert chip_of("cpu") is None


def test_an_unknown_chip_lists_all_of_them():
    with pytest.raises(InputError) as error:
        Target.parse("h10:1x8")
    assert "Did you mean 'h100'?" in str(error.value) and ", ".join(chip_names()) in str(error.value)
