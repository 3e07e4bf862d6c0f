"""What `sync:` refuses, with file and line."""

from pathlib import Path

import pytest

from jgt.document import InputError
from train.config import load, replica_problems
from train.settings.command_line import FEWER
from train.setup import prepare

RULES = Path(__file__).parents[3] / "configs" / "rules"
MESH = "mesh: {replica: 2, fsdp: 4}"


@pytest.fixture
def refused(tiny_file, tmp_path):
    def run(sync, mesh=MESH, rules="hybrid", more=""):
        path = tmp_path / "run.yaml"
        where = rules if isinstance(rules, Path) else RULES / f"{rules}.yaml"
        path.write_text(f"extends: {tiny_file}\nsync: {sync}\n{mesh}\nrules: {where}\n{more}")
        with pytest.raises(InputError) as raised:
            prepare(load(path), num_devices=8)
        return path, raised.value.problems

    return run


@pytest.mark.parametrize(
    ("sync", "key", "message"),
    [
        ("{axis: pod}", "axis", "the mesh has no axis 'pod'"),
        ("{axis: fsdp}", "axis", "the batch is split over replica, fsdp: only the outermost, replica, can be exchanged apart"),
        ("{axis: replica, every: 30}", "every", "30 is more than train.steps 20"),
        ("{axis: replica, outer: {}}", "outer", "is a step on parameters, but every: 1 exchanges gradients"),
        ("{axis: replica, every: 5, late: 1}", "late", "is about gradients, but every: 5 exchanges parameters"),
        ("{axis: replica, late: 2}", "late", ""),
        ("{axis: replica, fragments: 2}", "fragments", "is about exchanges of parameters, but every: 1 exchanges gradients"),
        ("{axis: replica, every: 5, fragments: 6}", "fragments", "6 do not fit into a phase of 5 steps"),
        ("{axis: replica, every: 5, overlap: 1}", "overlap", "unknown key"),
        ("{axis: replica, wire: int8, feedback: true}", "feedback", "unknown key. Known: axis, every, outer, wire, late, fragments"),
        ("{axis: replica, every: 5, outer: {momentum: 1}}", "outer.momentum", "1 never forgets a change"),
    ],
)
def test_one_key(refused, sync, key, message):
    path, problems = refused(sync)
    assert any(problem.startswith(f"{path}:2: sync.{key}: {message}") for problem in problems), problems


def test_an_axis_of_one_device(refused):
    for mesh in ("mesh: {replica: 1, fsdp: 8}", "mesh: {replica: -1, fsdp: 8}"):
        path, problems = refused("{axis: replica}", mesh)
        (problem,) = problems
        assert problem.startswith(
            f"{path}:2: sync.axis: the mesh has 1 device along replica, so there is no other replica to exchange with"
        )


def test_where_the_launcher_may_lose_groups_an_axis_of_any_size_may_have_one_device(tiny_file, monkeypatch):
    def problems(size):
        run = load(tiny_file, [f"rules={RULES / 'hybrid.yaml'}", f"mesh={{replica: {size}, fsdp: 8}}", "sync={axis: replica, every: 5}"])
        return list(replica_problems(run, {"replica": 1, "fsdp": 8}))

    assert problems(-1)
    monkeypatch.setenv(FEWER, "1")
    assert not problems(-1)
    with pytest.raises(InputError, match="the mesh has 1 device along replica"):
        problems(1)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("params: {'**/kernel': [replica, fsdp]}", "parameters"),
        ("optimizer: {'**/kernel': [[replica, fsdp], null]}", "the optimizer state"),
        ("signals: {head: {tensors: {logits: [null, null, replica]}}}", "another dim than the rows"),
    ],
)
def test_a_rule_that_splits_anything_else_over_the_axis(refused, tmp_path, line, what):
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"axes: {{batch: [replica]}}\ndefault: replicate\n{line}\n")
    path, problems = refused("{axis: replica, every: 5}", rules=rules)
    assert any(
        p.startswith(f"{rules}:3: ") and f"splits {what} over replica, along which sync.axis ({path}:2) has whole replicas" in p
        for p in problems
    ), problems


def test_a_batch_that_the_axis_does_not_split(refused, tmp_path):
    path, problems = refused("{axis: fsdp}", "mesh: {data: 2, fsdp: 4}", "replicated")
    assert any(p.startswith(f"{path}:2: sync.axis: the batch is split over data, not over fsdp") for p in problems), problems


@pytest.mark.parametrize(
    ("sync", "more", "key"),
    [
        ("{axis: replica, late: 1}", "train: {skip_spikes: {}}", "train.skip_spikes"),
        ("{axis: replica}", "model: {fp8: true, dtype: bf16}", "model.fp8"),
    ],
)
def test_sections_that_do_not_go_with_it(refused, sync, more, key):
    _, problems = refused(sync, more=more)
    assert any(f": {key}: " in p and "cannot be combined with sync" in p for p in problems), problems
