"""`train.auto`: a run takes the best layout for its devices, keeps it, and chooses anew on others."""

import argparse
import json

import pytest

from jgt.document import InputError
from jgt.planner.hardware.target import Target
from train.config import load
from train.plan import auto
from train.plan.auto import target_at_hand, with_best_layout
from train.plan.search.layout import Candidate, Roles
from train.plan.search.plans import PlanFigures, RunFile, in_process
from train.plan.search.search import PlannedLayout
from train.plan.search.space import candidates
from train.plan.trial import devices_at_hand, step_seconds
from train.settings.code.files import Code

FILE = """
run: {name: mine}
model: {kind: llama, layers: 2, embed: 64, heads: 4, kv_heads: 4, ffn: 128, vocab: 256, seq: 32}
train: {batch: 16, auto: true}
"""


def candidates_of_any_run():
    roles = Roles(batch=("fsdp",), weights=("fsdp",))
    return [Candidate(mesh=(("fsdp", n),), rules="jgt:fsdp", roles=roles, accumulate=1, rows=1, remat=None) for n in (1, 2, 4, 8)]


class Planned:
    """A search that plans the first layouts with rules of its space, whatever they are."""

    searches: list[str] = []

    def __init__(self, *, opened, target, **_):
        self.target, self.tries = target, []
        for rank, one in enumerate([c for c in candidates(opened, target.num_devices) if c.rules == "jgt:fsdp_tensor"][:2], 1):
            plan = PlanFigures(seconds=float(rank), peak_bytes=10**9, fits=True, flops=1.0, exposed={"tensor": 0.1 * rank})
            self.tries.append(PlannedLayout(candidate=one, plan=plan, estimate=None))

    def run(self):
        Planned.searches.append(self.target.text)

    def ranked(self):
        return self.tries

    @property
    def best(self):
        return self.tries[0]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A start of the run on a target; returns the run, and the lines that it said."""
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    monkeypatch.setattr(auto, "LayoutSearch", Planned)
    monkeypatch.setattr(auto, "in_process", lambda *_: pytest.fail("the plans are far apart"))
    Planned.searches = []

    def start(target, *overrides, num_processes=1):
        monkeypatch.setattr(auto, "target_at_hand", lambda run, where: Target.parse(target))
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
    assert target_at_hand(load(str(tmp_path / "run.yaml")), "train.auto").text == f"{chip}:1x4"


def test_what_the_file_sets_stays(start):
    run, _ = start("h100:1x8", "train.remat=block", "mesh={tensor: 4, data: -1}")
    assert run.config.train.remat == "block"
    assert run.mesh["tensor"] == 4


def test_a_damaged_choice_is_refused_by_name(start, tmp_path):
    start("h100:1x8")
    (tmp_path / "mine" / "layout.json").write_text("[1")
    with pytest.raises(InputError, match=r"layout\.json: is damaged"):
        start("h100:1x8")


@pytest.mark.parametrize(
    "forged",
    [
        ["run.dir=/elsewhere", "optimizer.lr=0.5", "xla.cache=/elsewhere"],
        ["mesh={data: 3}"],
        ["run.dir=/elsewhere"],
        "mesh",
        [{"mesh": 1}],
        None,
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_forged_choice_sets_nothing(start, tmp_path, forged, beside):
    run, _ = start("h100:1x8")
    path = tmp_path / "mine" / "layout.json"
    kept = json.loads(path.read_text())
    right = kept["overrides"]
    path.write_text(json.dumps({**kept, "overrides": [*right, *forged] if beside and isinstance(forged, list) else forged}))
    again, said = start("h100:1x8")
    assert (again.config, again.mesh) == (run.config, run.mesh)
    assert "names no layout of this search" in said[0]
    assert json.loads(path.read_text())["overrides"] == right


def test_several_processes_are_refused(start):
    with pytest.raises(InputError, match=r"run.yaml:4: train.auto: is for a run of one process, and this one has 4"):
        start("h100:1x8", num_processes=4)


def test_devices_without_times_are_refused(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.setattr(auto, "_devices", lambda run, where: (4, "Mystery"))
    with pytest.raises(InputError, match="layouts cannot be compared: jgt has no chip file for the device Mystery, so there are no times"):
        target_at_hand(load(str(tmp_path / "run.yaml")), "train.auto")


def test_cpu_devices_have_rough_times(tmp_path):
    (tmp_path / "run.yaml").write_text(FILE)
    target = target_at_hand(load(str(tmp_path / "run.yaml"), ["devices.virtual_cpu=4"]), "train.auto")
    assert (target.text, target.num_devices, target.chip.platform) == ("cpu:1x4", 4, "cpu")


@pytest.mark.parametrize(
    ("measured", "chosen"), [([3.0, 2.0, "no memory"], 1), ([1.0, 2.0, 3.0], 0), (["no memory"] * 3, 0)], ids=["second", "first", "none"]
)
def test_layouts_with_near_plans_are_measured(measured, chosen, monkeypatch):
    opened = candidates_of_any_run()
    near = [
        PlannedLayout(candidate=one, plan=PlanFigures(seconds=1 + rank / 10, fits=True), estimate=None)
        for rank, one in enumerate(opened[:3])
    ]
    far = PlannedLayout(candidate=opened[3], plan=PlanFigures(seconds=2.0, fits=True), estimate=None)
    asked, said, file = [], [], RunFile(config="run.yaml", overrides=("train.batch=8",))
    monkeypatch.setattr(auto, "in_process", lambda function, *arguments: asked.append(arguments) or measured)
    assert auto.fastest([*near, far], file, said.append) is near[chosen]
    assert asked == [([file.adding(*one.candidate.overrides) for one in near],)]
    assert "measuring 3 layouts" in said[0]
    assert ["did not run: no memory" in line for line in said[1:]] == [isinstance(one, str) for one in measured]


def test_a_measurement_that_dies_leaves_the_best_plan(monkeypatch):
    near = [PlannedLayout(candidate=one, plan=PlanFigures(seconds=1.0, fits=True), estimate=None) for one in candidates_of_any_run()]
    said = []

    def died(*_):
        raise RuntimeError("its process died")

    monkeypatch.setattr(auto, "in_process", died)
    assert auto.fastest(near, RunFile(config="run.yaml"), said.append) is near[0]
    assert said[-1] == "  the measurement failed: its process died"


def test_steps_are_measured_in_another_process(tmp_path):
    (tmp_path / "run.yaml").write_text(FILE)
    layouts = [["mesh={data: 2}", "rules=jgt:replicated"], ["mesh={tensor: 3}", "rules=jgt:tensor"]]
    file = RunFile(config=str(tmp_path / "run.yaml"), overrides=("devices.virtual_cpu=2", "train.steps=1"))
    fast, impossible = in_process(step_seconds, [file.adding(*one) for one in layouts])
    assert 0 < fast < 10
    assert isinstance(impossible, str)


def test_devices_are_looked_at_in_another_process():
    assert in_process(devices_at_hand)[1] == "cpu"
