"""`train.auto`: a run takes the best layout for its devices, keeps it, and chooses anew on others."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from jgt.document import InputError
from jgt.hardware.chip import parse_target
from train.code.files import Code
from train.config import load
from train.search import auto
from train.search.auto import target_at_hand, with_best_layout
from train.search.layout import Candidate
from train.search.plans import Answer
from train.search.search import Try

FILE = """
run: {name: mine}
model: {kind: llama, layers: 2, embed: 64, heads: 4, kv_heads: 4, ffn: 128, vocab: 256, seq: 32}
train: {batch: 16, auto: true}
"""


def candidates_of_any_run():
    return [Candidate(mesh=(("fsdp", n),), rules="jgt:fsdp", batch_axes=("fsdp",), accumulate=1, rows=1, remat=None) for n in (1, 2, 4, 8)]


class Planned:
    """A search that plans the first layouts with rules of its space, whatever they are."""

    searches: list[str] = []

    def __init__(self, *, target, space, question, **_):
        self.target, self.tries, self.question = target, [], question
        for rank, one in enumerate([c for c in space if c.rules == "jgt:fsdp_tensor"][:2], 1):
            plan = Answer(seconds=float(rank), peak_bytes=10**9, fits=True, flops=1.0, exposed={"tensor": 0.1 * rank})
            self.tries.append(Try(candidate=one, plan=plan, estimate=None))

    def run(self):
        Planned.searches.append(self.target.text)

    def ranked(self):
        return self.tries


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start of the run on a target; returns the run, and the lines that it said."""
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    monkeypatch.setattr(auto, "LayoutSearch", Planned)
    monkeypatch.setattr(auto, "step_seconds", lambda *_: pytest.fail("the plans are far apart"))
    Planned.searches = []

    def start(target, *overrides, num_processes=1):
        monkeypatch.setattr(auto, "target_at_hand", lambda run, where, say: parse_target(target))
        arguments = argparse.Namespace(config=str(path), overrides=[f"run.dir={tmp_path / 'mine'}", *overrides], code=[])
        said = []
        run = with_best_layout(load(arguments.config, arguments.overrides, code=Code()), arguments, num_processes, said.append)
        return run, said

    return start


def test_the_best_layout_is_taken_and_kept(start, tmp_path):
    run, said = start("h100:1x8")
    assert run.rules_root is not None
    assert run.mesh["tensor"] > 1
    assert "train.auto: h100:1x8: fsdp_tensor" in said[0]
    assert "next:" in said[1]
    kept = json.loads((tmp_path / "mine" / "layout.json").read_text())
    assert kept["asked"]["target"] == "h100:1x8"
    again, said = start("h100:1x8")
    assert again.mesh == run.mesh
    assert "chosen at an earlier start" in said[0]
    assert Planned.searches == ["h100:1x8"]


def test_other_devices_or_other_keys_choose_anew(start):
    start("h100:1x8")
    run, _ = start("h100:1x4")
    assert run.mesh != start("h100:1x8")[0].mesh
    start("h100:1x8", "train.batch=32")
    start("h100:1x8", "train.batch=32", "model.layers=4")
    assert Planned.searches == ["h100:1x8", "h100:1x4", "h100:1x8", "h100:1x8", "h100:1x8"]
    # Another number of steps is the same work.
    start("h100:1x8", "train.batch=32", "model.layers=4", "train.steps=7")
    assert len(Planned.searches) == 5


@pytest.mark.parametrize(("kind", "chip"), [("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA A100-SXM4-80GB", "a100")])
def test_a_device_is_known_by_its_kind(kind, chip, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.setattr(auto, "_devices", lambda run, where: (4, kind))
    assert target_at_hand(load(str(tmp_path / "run.yaml")), "train.auto", print).text == f"{chip}:1x4"


def test_what_the_file_sets_stays(start):
    run, _ = start("h100:1x8", "train.remat=block", "mesh={tensor: 4, data: -1}")
    assert run.config.train.remat == "block"
    assert run.mesh["tensor"] == 4


def test_a_damaged_choice_is_refused_by_name(start, tmp_path):
    start("h100:1x8")
    (tmp_path / "mine" / "layout.json").write_text("[1")
    with pytest.raises(InputError, match=r"layout\.json: is damaged"):
        start("h100:1x8")


def test_several_processes_are_refused(start):
    with pytest.raises(InputError, match=r"run.yaml:4: train.auto: is for a run of one process, and this one has 4"):
        start("h100:1x8", num_processes=4)


def test_devices_without_times_are_refused(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.setattr(auto, "_devices", lambda run, where: (4, "Mystery"))
    with pytest.raises(InputError, match="no times for the device Mystery"):
        target_at_hand(load(str(tmp_path / "run.yaml")), "train.auto", print)


def test_cpu_devices_are_measured_once(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(FILE)
    run, said, calls = load(str(tmp_path / "run.yaml"), ["devices.virtual_cpu=4"]), [], []

    def calibrated(command, **_):
        calls.append(command)
        path = Path(command[command.index("--write") + 1])
        path.parent.mkdir(parents=True)
        path.write_text(CHIP)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto.subprocess, "run", calibrated)
    for _ in range(2):
        target = target_at_hand(run, "train.auto", said.append)
        assert (target.text, target.chip.platform) == ("cpu:1x4", "cpu")
    assert len(calls) == len(said) == 1
    assert "measuring 4 CPU devices once" in said[0]


def test_a_failed_measurement_names_its_last_line(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(FILE)
    failed = subprocess.CompletedProcess([], 1, stderr="jgt calibrate: no space left\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=r"train.auto: the CPU devices cannot be measured: jgt calibrate: no space left"):
        target_at_hand(load(str(tmp_path / "run.yaml"), ["devices.virtual_cpu=4"]), "train.auto", print)


@pytest.mark.parametrize(("measured", "chosen"), [([3.0, 2.0, None], 1), ([1.0, 2.0, 3.0], 0), ([None, None, None], 0)])
def test_layouts_with_near_plans_are_measured(measured, chosen, monkeypatch):
    opened = candidates_of_any_run()
    near = [Try(candidate=one, plan=Answer(seconds=1 + rank / 100, fits=True), estimate=None) for rank, one in enumerate(opened[:3])]
    far = Try(candidate=opened[3], plan=Answer(seconds=2.0, fits=True), estimate=None)
    asked, said = [], []
    monkeypatch.setattr(auto, "step_seconds", lambda question: (asked.append(question) or measured, []))
    assert auto.fastest([*near, far], "run.yaml", ["train.batch=8"], [], said.append) is near[chosen]
    assert asked[0]["overrides"] == [["train.batch=8", *one.candidate.overrides] for one in near]
    assert "measuring 3 layouts" in said[0]
    assert ["did not run" in line for line in said[1:]] == [one is None for one in measured]


def test_steps_are_measured_in_another_process(tmp_path):
    (tmp_path / "run.yaml").write_text(FILE)
    layouts = [["mesh={data: 2}", "rules=jgt:replicated"], ["mesh={tensor: 3}", "rules=jgt:tensor"]]
    given = ["devices.virtual_cpu=2", "train.steps=1"]
    question = {"config": str(tmp_path / "run.yaml"), "overrides": [[*given, *one] for one in layouts], "code": []}
    (fast, impossible), said = auto.step_seconds(question)
    assert 0 < fast < 10
    assert impossible is None
    assert len(said) == 1
    assert said[0].startswith("layout 2: ")


CHIP = """
name: cpu
platform: cpu
devices: 4
tflops: {tf32: 0.05, bf16: 0.02}
hbm_gb: 3
hbm_gbs: 6
host_gbs: 5
rates: {matmul: {bf16: {share: 1}}, attention: {forward: 1, backward: 1}, memory: {share: 1}, launch_us: 1}
links: {memory: {gbs: 6, domain: all, share: 1, start_us: 90, hop_us: 3}}
"""
