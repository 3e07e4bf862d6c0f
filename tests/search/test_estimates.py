"""Estimates of layouts that a search did not choose, against stored plans of them."""

import statistics

import pytest
import yaml

from benchmarks.estimates import FITTED, read_sample
from benchmarks.search import RUNS


@pytest.fixture(scope="module")
def figures():
    """For each model whose plans are stored, how far its estimates are from the plans of all layouts that were drawn."""
    runs = yaml.safe_load(RUNS.read_text())
    samples = [read_sample(row, runs[row]) for row in FITTED]
    return [sample.figures(sample.estimator(), near=False) for sample in samples]


@pytest.mark.parametrize(("name", "most"), [("time", 0.10), ("memory", 0.10)])
def test_estimates_are_close_to_plans(figures, name, most):
    assert statistics.mean(one[name] for one in figures) <= most


def test_estimates_have_the_order_of_plans(figures):
    assert statistics.mean(one["kendall"] for one in figures) >= 0.8


def test_the_stored_layouts_are_still_offered(figures):
    assert min(one["layouts"] for one in figures) >= 10
