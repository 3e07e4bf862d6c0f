"""The benchmark of serving measures the same answers on both sides."""

import pytest

from benchmarks import serving

pytestmark = pytest.mark.slow


def test_engine_and_generate_answer_the_same_prompts(monkeypatch, capsys):
    monkeypatch.setattr(serving, "TOKENS", 4)
    monkeypatch.setattr(serving, "LENGTHS", {"one": [5], "mixed": [5, 20, 5]})
    monkeypatch.setattr("sys.argv", ["serving.py", "--rounds", "1"])
    serving.main()
    assert "mixed" in capsys.readouterr().out
