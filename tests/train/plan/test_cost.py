"""Costs of a run from the time of one step: the arithmetic by hand, for the built-in models and for data of one's own."""

from types import SimpleNamespace

import pytest

from jgt.document import InputError
from train.config import load
from train.plan.__main__ import main
from train.plan.cost import costs_of, print_costs

OWN = """
import numpy as np

def data(split):
    return [{"x": np.zeros(4, np.float32)} for _ in range(640)]

def loss(model, batch):
    return 0.0
"""
QUICKSTART = "configs/quickstart.yaml"


def plan(tokens_per_s=None, per_hour=8.0, step_ms=3600.0):
    """A step of 3.6 s by default: 1,000 steps are an hour."""
    speed = SimpleNamespace(tokens_per_s=tokens_per_s, dollars_per_hour=per_hour)
    return SimpleNamespace(step_time_ms=step_ms, step_time_caveat="", speed=speed)


def test_the_costs_of_a_decoder():
    run = load(QUICKSTART, ["train.steps=5000", "train.batch=50"])
    found = {cost.of: (cost.steps, cost.hours, cost.dollars) for cost in costs_of(run, plan(tokens_per_s=1e6 / 3.6), None)}
    expected = {"this run, 5,000 steps": (5000, 5, 40), "1,000 samples": (20, 0.02, 0.16), "1e+09 tokens": (1000, 1, 8)}
    assert found.keys() == expected.keys()
    for of, values in expected.items():
        assert found[of] == pytest.approx(values)
    assert costs_of(run, plan(tokens_per_s=1e6 / 3.6), 15e12)[-1].dollars == pytest.approx(120_000)
    assert costs_of(run, plan(per_hour=None), None)[0].dollars is None
    assert costs_of(run, plan(step_ms=None), None) == []


def test_the_costs_of_data_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(OWN)
    overrides = ["data={source: 'mine:data'}", "train={loss: 'mine:loss', epochs: 3, batch: 32}", "model={kind: 'mine:loss'}"]
    run = load({"devices": {"virtual_cpu": 1}}, overrides, code=[str(tmp_path / "mine.py")])
    found = costs_of(run, plan(), None)
    assert [(cost.of, cost.steps) for cost in found] == [
        ("this run, 3 epochs", 60),
        ("an epoch, 640 samples", 20),
        ("1,000 samples", 31.25),
    ]
    print_costs(found)
    assert "this run, 3 epochs" in capsys.readouterr().out
    with pytest.raises(InputError, match="the inputs of this model are not tokens"):
        costs_of(run, plan(), 1e9)


def test_tokens_are_read_before_anything_is_compiled(capsys):
    assert main([QUICKSTART, "--tokens", "many"]) == 2
    problems = capsys.readouterr().err.splitlines()
    assert problems == ["--tokens is about the GPUs of a target. Add --target CHIP:HOSTSxGPUS", problems[1]]
    assert problems[1].startswith("command line: --tokens: many is not a number of tokens")
