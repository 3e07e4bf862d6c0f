"""Plans that are stored: whatever has become of a file, it is a plan or nothing."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import jgt
from train.plan.search import plans
from train.plan.search.plans import PlanFigures


def test_a_stored_plan_is_found(tmp_path):
    answer = PlanFigures(seconds=2.5, peak_bytes=7, fits=True, exposed={"data": 0.5}, warnings=("close",))
    plans._write(tmp_path / "plan.json", answer)
    assert plans._read(tmp_path / "plan.json") == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"other": 1}',
        *(json.dumps({**asdict(PlanFigures()), "seconds": seconds}) for seconds in ("abc", None, float("inf"), float("nan"), -5)),
    ],
)
def test_a_damaged_plan_is_none(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert plans._read(tmp_path / "plan.json") is None


def test_plans_are_those_of_the_code_of_both_packages(monkeypatch):
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda file: read.append(file) or b"")
    plans._versions.__wrapped__()
    assert {Path(jgt.__file__), Path(plans.__file__)} <= set(read)
