"""The benchmark of programs through jgt: it adds to a file, and counts no seed twice."""

import json

from benchmarks import conformance as benchmark
from jgt.conformance.campaign import Crash, versions


class Told:
    """A worker of which every job has three programs; XLA's compiler dies of the third job."""

    cpu = 1.0

    def __init__(self):
        self.jobs = []

    def ask(self, job):
        self.jobs.append((job["do"], job["seed"]))
        assert job["steered"] is False
        if len(self.jobs) == 3:
            return Crash(trying={}, reason="exit code -6")
        program = {"steps": [{"name": "v0", "code": "x0"}], "mesh": [2], "specs": {}}
        wrong = [{"program": program, "differences": [{"what": "value v0", "error": 1.0, "draw": 0}]}] if job["seed"] % 2 else []
        return {"programs": 3, "right": 3 - len(wrong), "wrong": wrong, "refused": [], "changed": 1}


def test_the_sum_of_all_calls_and_no_seed_twice(tmp_path, capsys):
    file, worker = tmp_path / "sum.json", Told()
    benchmark.run(9, 10_000, file, worker)
    first = json.loads(file.read_text())[versions()["jax"]]
    assert first["chains"] == {"programs": 10, "right": 8, "wrong": 1, "refused": 0, "changed": 3, "crashed": 1}
    assert first["single"]["programs"] == 3 and first["seeds"] == {"10000": 10_004}
    assert [found["seed"] for found in first["wrong"]] == [10_003]
    benchmark.run(3, 10_000, file, worker)
    benchmark.run(3, 0, file, worker)
    again = json.loads(file.read_text())[versions()["jax"]]
    assert again["chains"]["programs"] == 16 and again["seeds"] == {"10000": 10_005, "0": 1}
    assert len(worker.jobs) == len(set(worker.jobs))
    assert "died" in capsys.readouterr().out
