"""The search itself, with plans of a made-up machine: it finds what is fastest there, by few plans, and never loses what it has found."""

import concurrent.futures
import math
import os
import time
from dataclasses import replace

import pytest

from jgt.document import InputError
from jgt.planner.hardware.target import Target
from train.config import load
from train.plan.__main__ import main as plan
from train.plan.answer import accuracy, answer_json, print_answer, run_document, write_run
from train.plan.search.layout import num_changes
from train.plan.search.plans import PlanFigures, Plans, RunFile
from train.plan.search.search import LayoutSearch, PlannedLayout
from train.plan.search.space import OpenLayout, index_of

MODEL = "model={kind: llama, layers: 16, embed: 256, heads: 8, kv_heads: 8, ffn: 1024, vocab: 1024, seq: 1024}"
FLOPS, PARAMETERS, LAYERS = 1e18, 2e10, 2e9
"""Of the made-up model: FLOPs of a step, parameters, and bytes of what `block` keeps for a row."""


class MadeUp:
    """Answers as if a machine had been planned for, whose times no estimate has been told."""

    def __init__(self, *, raises=None, refuses=lambda _: False):
        self.asked, self.workers, self.num_found = [], 2, 0
        self._raises, self._refuses = raises, refuses

    def ask(self, file, target):
        self.asked.append(file)
        if self._raises is not None and len(self.asked) > self._raises:
            raise KeyboardInterrupt
        one = SPACE[file.overrides[len(BASIS) :]]
        return done(PlanFigures(problems=("cannot be compiled",)) if self._refuses(one) else made_up(one))

    def close(self):
        pass


def done(answer):
    future = concurrent.futures.Future()
    future.set_result(answer)
    return future


def made_up(one):
    sizes = dict(one.mesh)
    devices = math.prod(sizes.values())
    again = {"block": 0.31, "matmuls": 0.04, "none": 0.0}[one.remat or "block"]
    bubble = 0.0 if one.stages is None else (sizes["stage"] - 1) / one.stages.microbatches / (one.stages.virtual or 1)
    matmul = FLOPS / devices / 4e14 * (1.3 if one.stages else 1) * (1 + 0.2 / one.rows)
    compute = matmul * (1 + again) * (1 + bubble)
    tensor = 0.2 * math.log2(sizes.get("tensor", 1))
    split = math.prod(size for axis, size in one.mesh if axis not in ("data", "replica"))
    kept = LAYERS * one.rows * {"block": 1, "matmuls": 7, "none": 13}[one.remat or "block"] / sizes.get("tensor", 1)
    peak = 16 * PARAMETERS / split + kept / sizes.get("stage", 1)
    return PlanFigures(
        seconds=compute + tensor,
        peak_bytes=round(peak),
        args_bytes=round(12 * PARAMETERS / split),
        activations=round(kept),
        fits=peak < 0.95 * 80e9,
        flops=FLOPS * (1 + again) / devices,
        model_flops=FLOPS / devices,
        parameter_bytes=round(4 * PARAMETERS / split),
        exposed={"tensor": tensor},
        parts={"matmul": matmul, "recompute": matmul * again, "bubble": matmul * (1 + again) * bubble, "exposed": tensor},
    )


SPACE = {}
BASIS = ("mesh=null", "pipeline=null", "devices.virtual_cpu=32")


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"{MODEL.replace('=', ': ', 1)}\ntrain: {{batch: 128, remat: auto}}\nmesh: {{data: -1}}\n")
    return str(path)


@pytest.fixture
def make_search(run_file):
    """A search on 32 devices, and what it printed."""

    def make(**options):
        target, said = Target.parse("h100:4x8"), []
        opened = OpenLayout.read(RunFile(config=run_file, overrides=("mesh=null",)))
        search = LayoutSearch(opened=opened, target=target, plans=MadeUp(**options), seconds=60, top=4, say=said.append)
        SPACE.clear()
        SPACE.update({tuple(one.overrides): one for one in search.space})
        return search, said

    return make


def test_the_fastest_is_found_by_few_plans(make_search):
    search, _ = make_search()
    search.run()
    plans = [made_up(one) for one in search.space]
    fastest = min(plan.seconds for plan in plans if plan.fits)
    assert search.best.plan.seconds <= 1.03 * fastest
    assert len(search.tries) < 60 < len(search.space) / 20
    assert search.ranked() == sorted(search.ranked(), key=lambda t: t.plan.seconds)


def test_neighbours_of_the_best_are_planned_too(make_search):
    search, _ = make_search()
    search.run()
    after = search.tries[search.tries.index(search.best) + 1 :]
    assert len([one for one in after if num_changes(one.candidate, search.best.candidate) == 1]) >= 3
    # The search ends because none of these is faster.
    assert len(after) >= 10


def test_the_scale_of_estimates_is_that_of_the_plans(make_search):
    search, _ = make_search()
    search.run()
    ratios = sorted(one.plan.seconds / search.estimator.estimate(search.space.index(one.candidate)).seconds for one in search.tries)
    assert ratios[0] <= 1 <= ratios[-1]


def test_the_layout_of_the_file_is_planned_early(make_search, run_file):
    search, _ = make_search()
    overrides = search.space[700].overrides
    own = load(run_file, ["devices.virtual_cpu=32", *overrides])
    search.begin = index_of(own, search.opened, search.space)
    assert search.begin == 700
    search.run()
    assert search.space[700] in [one.candidate for one in search.tries[:3]]


def test_the_first_plan_of_a_step_in_parts_is_one_part(make_search):
    search, _ = make_search()
    search.space = [one for one in search.space if one.accumulate == 2 and one.stages is None]
    asked = []
    search.plans.ask = lambda file, target: asked.append(file) or done(replace(made_up(search.space[0]), problems=("stop",)))
    with pytest.raises(InputError, match="stop"):
        search.run()
    assert asked[0].overrides[-2:] == ("train.accumulate=1", "train.batch=64")
    assert asked[0].overrides[len(BASIS) : -2] in [tuple(one.overrides) for one in search.space]


def test_an_interrupted_search_keeps_what_it_has(make_search):
    search, said = make_search(raises=5)
    search.run()
    assert len(search.tries) == 5
    assert search.best is not None
    assert "best so far" in said[-1]


def test_layouts_that_cannot_be_compiled_are_passed_by(make_search):
    search, said = make_search(refuses=lambda one: one.stages is not None or one.remat == "matmuls")
    search.run()
    assert search.best.candidate.remat in ("none", "block")
    assert any("refused" in line for line in said)


def test_a_size_that_divides_nothing_is_given_up(make_search):
    search, _ = make_search(refuses=lambda one: one.size(["tensor"]) in (2, 4))
    search.run()
    refused = [t.candidate.size(["tensor"]) for t in search.tries if t.plan.problems]
    # Two sizes, each refused twice while two more plans are under way.
    assert 0 < len(refused) <= 2 * (2 + 2)
    assert search.pruned()["of sizes that were refused"] > 50


def test_the_written_file_is_the_layout(make_search, run_file, tmp_path):
    search, _ = make_search()
    search.run()
    for one in [search.best, *[t for t in search.tries if t.candidate.stages and t.plan.is_usable][:1]]:
        path = tmp_path / "deep" / "best.yaml"
        path.parent.mkdir(exist_ok=True)
        write_run(path, run_document(RunFile(config=run_file, overrides=("train.steps=7", "mesh=null")), one, path.parent), one, "h100:4x8")
        run = load(path, ["devices.virtual_cpu=32"])
        expected = load(run_file, ["devices.virtual_cpu=32", "train.steps=7", *one.candidate.overrides])
        assert (run.mesh, run.rules, run.pipeline) == (expected.mesh, expected.rules, expected.pipeline)
        assert replace(run.config.train) == replace(expected.config.train)
        assert {limit.key for limit in run.budget.limits} == {"peak_gb", "step_ms"}


def test_the_answer_says_why_and_how_sure(make_search, capsys):
    search, _ = make_search()
    search.run()
    print_answer(search, "made up", batch_tokens=128 * 1024)
    text = capsys.readouterr().out
    assert "not planned" in text
    assert "The estimates differ from their plans by" in text
    found = answer_json(search, 128 * 1024)
    assert found["best"][0]["plan"]["seconds"] == search.best.plan.seconds
    assert accuracy(search.tries)["time"] < 0.25


def test_a_loser_is_told_its_largest_difference(make_search):
    search, _ = make_search()
    one = search.space[0]
    best = PlannedLayout(candidate=one, plan=PlanFigures(seconds=1.0, flops=1e15, exposed={"tensor": 0.1}), estimate=None)
    waits = PlannedLayout(candidate=one, plan=PlanFigures(seconds=1.5, flops=1e15, exposed={"tensor": 0.6}), estimate=None)
    computes = PlannedLayout(candidate=one, plan=PlanFigures(seconds=1.3, flops=1.3e15, exposed={"tensor": 0.1}), estimate=None)
    assert waits.why_slower(best) == "+50%: waits 0.6 s for tensor, the best 0.1"
    assert computes.why_slower(best) == "+30%: computes 30% more"


def dies(file, target):
    os._exit(3)


def succeeds(file, target):
    print("what XLA says")
    return PlanFigures(seconds=1.0, peak_bytes=os.getpid(), fits=True)


def test_a_process_that_dies_takes_only_its_plan(tmp_path, run_file):
    plans = Plans(dies, tmp_path, workers=1)
    asked = RunFile(config=run_file, overrides=("mesh={data: 8}", "devices.virtual_cpu=8")), Target.parse("h100:1x8")
    try:
        assert "died" in plans.ask(*asked).result().problems[0]
        assert not list(tmp_path.glob("*.json"))
        plans._make = succeeds
        found = plans.ask(*asked).result()
    finally:
        plans.close()
    assert found.seconds == 1.0
    assert found.peak_bytes != os.getpid()
    # It is remembered.
    assert Plans(dies, tmp_path).ask(*asked).result() == found


def test_a_search_ends_its_processes(run_file):
    plans = Plans(sleeps, None, workers=2)
    asked = [plans.ask(RunFile(config=run_file), Target.parse("h100:1x8")) for _ in range(3)]
    plans.close()
    assert all(one.cancelled() or one.result().problems for one in asked)


def sleeps(file, target):
    time.sleep(60)


def test_a_run_of_which_nothing_compiles_is_wrong_input(make_search, monkeypatch, capsys):
    search, _ = make_search(refuses=lambda _: True)
    monkeypatch.setattr("train.plan.searching.LayoutSearch", lambda **_: search)
    assert plan(["--config", search.opened.file.config, "--target", "h100:4x8", "--search"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "cannot be compiled"
