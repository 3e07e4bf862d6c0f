"""The benchmark of programs through jgt: it adds to a file, and counts no seed twice."""

import json

import pytest
from drawn import drawn

from benchmarks import conformance as benchmark
from jgt.conformance.campaign import Crash, versions
from jgt.conformance.classes import WrongClass

PAGE = benchmark.RESULTS.parents[2] / "docs" / "conformance.md"


@pytest.mark.skipif(not benchmark.CLASSES.exists(), reason="a distribution has no results")
def test_the_table_of_the_page_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["conformance.py", "--table"])
    benchmark.main()
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 10 and table in PAGE.read_text()


def test_classes_are_saved_as_they_are_met(tmp_path, monkeypatch, capsys):
    class Searched:
        cpu, unconfirmed, crashes, refusals, counts = 90.0, 0, {}, {}, {}

        def __init__(self, seed, found):
            self.classes = [
                WrongClass(program=drawn("jnp.cumsum(x0, 0)"), what=what, special=False, one_device=False) for what in ("value", "gradient")
            ]
            self.found = found

        def run(self, is_over):
            assert not is_over()
            self.found(self.classes[1], 30.0)

    monkeypatch.setattr(benchmark, "Search", Searched)
    file = tmp_path / "classes.json"
    file.write_text(json.dumps({"0.1": {"CPU minutes": 7.2, "classes": [{"name": "old", "CPU minutes": 3.0}]}}))
    found = benchmark.search(2, 4, file)
    assert [known["name"] for known in found["classes"]] == ["cumsum: gradient, 1 mesh axis"]
    assert "0.5 CPU-min: cumsum: gradient, 1 mesh axis" in capsys.readouterr().out
    version = versions()["jax"]
    assert benchmark.table(file).splitlines() == [
        f"| class | 0.1, 7 CPU-min | {version}, 2 CPU-min |",
        "| --- | --- | --- |",
        "| cumsum: gradient, 1 mesh axis |  | 0.5 |",
        "| old | 3.0 |  |",
    ]


class Told:
    """A worker of which every job has three programs; XLA's compiler dies of the third job. Draw 1 is wrong on one device, too."""

    cpu = 1.0

    def __init__(self):
        self.jobs = []

    def ask(self, job):
        if job["do"] == "judge":
            return {"one device": [job["draws"] == [1]]}
        self.jobs.append((job["do"], job["seed"]))
        assert job["steered"] is False
        if len(self.jobs) == 3:
            return Crash(trying={}, reason="exit code -6")
        program = {"steps": [{"name": "v0", "code": "x0"}], "mesh": [2], "specs": {}}
        draws = (0, 1) if job["seed"] % 2 else ()
        wrong = [{"program": program, "differences": [{"what": "value v0", "error": 1.0, "draw": draw}]} for draw in draws]
        return {"programs": 3, "right": 3 - len(wrong), "wrong": wrong, "refused": [], "changed": 1}


def test_the_sum_of_all_calls_and_no_seed_twice(tmp_path, capsys):
    file, worker = tmp_path / "sum.json", Told()
    benchmark.run(9, 10_000, file, worker)
    name = f"{versions()['jax']}, jgt {benchmark.code()}"
    first = json.loads(file.read_text())[name]
    counted = {"programs": 10, "right": 7, "wrong": 1, "wrong on one device": 1, "refused": 0, "changed": 3, "crashed": 1}
    assert first["chains"] == counted
    assert first["single"]["programs"] == 3 and first["seeds"] == {"10000": 10_004}
    assert [found["seed"] for found in first["wrong"]] == [10_003]
    benchmark.run(3, 10_000, file, worker)
    benchmark.run(3, 0, file, worker)
    again = json.loads(file.read_text())[name]
    assert again["chains"]["programs"] == 16 and again["seeds"] == {"10000": 10_005, "0": 1}
    assert len(worker.jobs) == len(set(worker.jobs))
    assert "died" in capsys.readouterr().out
