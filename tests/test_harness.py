"""The harness that all benchmarks share."""

import argparse
import json
import sys

import pytest

from benchmarks import harness


def test_the_order_turns_round_and_a_warm_up_does_not_count():
    assert list(harness.turns(["a", "b"], rounds=2, warmup=1)) == [
        ("a", False),
        ("b", False),
        ("b", True),
        ("a", True),
        ("a", True),
        ("b", True),
    ]


def test_functions_take_turns():
    calls = []
    samples = harness.interleave({name: lambda name=name: calls.append(name) or name for name in "ab"}, rounds=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {name: [s.found for s in found] for name, found in samples.items()} == {"a": ["a", "a"], "b": ["b", "b"]}


def test_ratios_are_pair_by_pair():
    over, under = ([harness.Sample(s=s, cpu_s=1.0) for s in seconds] for seconds in ([2.0, 30.0, 4.0], [1.0, 10.0, 2.0]))
    assert harness.ratios(over, under)["s_ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.5, "n": 3}
    assert "peak_mb_ratio" not in harness.ratios(over, under)


def test_a_process_counts_its_children_and_says_what_it_found():
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.2: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print('talk'); print('{{\"x\": 1}}')"
    sample = harness.run_process([sys.executable, "-c", code])
    assert sample.found == {"x": 1}
    assert sample.cpu_s > 0.2
    assert 1 < sample.peak_mb < 10_000


def test_a_process_that_fails_is_told_with_what_it_said():
    with pytest.raises(harness.FailedError, match=r"exit code 3 after 0 s\nno memory"):
        harness.run_process([sys.executable, "-c", "import sys; print('no memory', file=sys.stderr); sys.exit(3)"])


def test_a_process_that_hangs_is_ended():
    with pytest.raises(harness.FailedError, match="exit code -9"):
        harness.run_process([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2)


def test_a_result_says_where_it_is_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "find_device", lambda: {"kind": "NVIDIA H200", "count": 1, "cores": 16, "machine": "x86_64"})
    saved = json.loads(harness.save("step", {"s": 1.0}, tmp_path).read_text())
    assert next(tmp_path.iterdir()).name.startswith("step-nvidia-h200-x1-20")
    assert saved["found"] == {"s": 1.0}
    assert {"benchmark", "date", "command", "device", "versions"} <= saved.keys()
    assert saved["versions"].keys() == {"python", "jax", "jaxlib", "jgt"}
    harness.report("step", {"a": {"s": harness.spread([1.0, 2.0, 3.0])}}, argparse.Namespace(json=False, save=False))
    assert capsys.readouterr().out.split() == ["a", "s", "2", "(1.5", "to", "2.5,", "n", "3)"]


def test_a_result_names_no_folder_of_this_machine():
    text = f'"/usr/envs/one/bin/python {harness.ROOT}/benchmarks/step.py --x=/tmp/a_1/run 1/2 https://a.b/c/d configs/a.yaml"'
    assert harness.without_places(text) == '"python benchmarks/step.py --x=run 1/2 https://a.b/c/d configs/a.yaml"'
