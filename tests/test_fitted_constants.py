"""The benchmark that fits the cost model to published runs: its fit finds known constants, and its figures are those of textbooks."""

import math

import pytest

from benchmarks.constants import PRIORS, RUN, chip_with
from benchmarks.least_squares import Fit
from benchmarks.published import RUNS
from benchmarks.truth import order_of
from jgt.planner.hardware.chip import load_chip
from jgt.planner.hardware.target import Target

ONES = dict.fromkeys(PRIORS, 1.0)


def seconds(name, constants):
    """A made-up run: most of it takes one of the constants, and a tenth the next one."""
    values = list(constants.values())
    first = int(name) % len(values)
    return 9 / values[first] + 1 / values[(first + 1) % len(values)]


@pytest.fixture(scope="module")
def fit():
    true = {name: prior.value * 1.1 for name, prior in PRIORS.items()}
    runs = [str(n) for n in range(8 * len(PRIORS))]
    return Fit(seconds, {name: seconds(name, true) for name in runs}, PRIORS, dict.fromkeys(runs, RUN))


def test_the_fit_finds_the_constants_of_the_runs(fit):
    found = fit.of([str(n) for n in range(8 * len(PRIORS))])
    assert found == {name: pytest.approx(prior.value * 1.1, rel=0.03) for name, prior in PRIORS.items()}


def test_a_constant_that_no_run_needs_keeps_its_prior(fit):
    found = fit.of(["0"])
    (first, second, *others) = PRIORS
    assert found[first] > PRIORS[first].value * 1.01 and found[second] > PRIORS[second].value
    assert [found[name] for name in others] == pytest.approx([PRIORS[name].value for name in others])


def test_constants_take_the_place_of_a_chips_own():
    a100, h100 = (chip_with(load_chip(name), ONES | {"ampere": 0.5, "far": 0.25}) for name in ("a100", "h100"))
    assert a100.rates.matmul["bf16"].share == 0.5
    assert h100.rates.matmul["bf16"].share == h100.rates.matmul["f8"].share == h100.links["nvlink"].share == 1
    assert h100.links["nic"].share == 0.25


def test_the_shipped_chips_have_the_constants_of_one_fit():
    chips = [load_chip(name) for name in ("a100", "h100", "h100-96gb", "h200", "b200")]
    assert len({(chip.rates.attention, chip.rates.memory) for chip in chips}) == 1


def test_order():
    assert order_of([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert order_of([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert math.isclose(order_of([1, 2, 3, 4], [1, 3, 2, 4]), 0.8)


def test_the_published_runs_name_targets_and_settings():
    assert len(RUNS) == 25
    for run in RUNS.values():
        assert Target.parse(run.target).num_devices % 8 == 0
        assert any(text.startswith("mesh=") for text in run.overrides)
