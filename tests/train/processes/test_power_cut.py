"""Power cuts: whatever of a run's checkpoints was not written to disk with fsync is dropped, and a whole step remains."""

import random

import pytest
from disk import Power, cuts, read_log, variables

from train.checkpoint.manifest import BrokenError
from train.checkpoint.steps import Steps

STEPS = 8


@pytest.fixture(scope="module")
def log(tmp_path_factory, disk_nursery, tiny_file):
    """The changes that a run with `checkpoint.keep=1` makes in its checkpoints, the contents of its files, and their folder."""
    folder = tmp_path_factory.mktemp("power")
    (folder / "store").mkdir()
    environment = variables(log=folder / "log", store=folder / "store")
    arguments = ["--config", str(tiny_file), f"run.dir={folder / 'run'}", f"train.steps={STEPS}", "checkpoint={every: 1, keep: 1}"]
    assert disk_nursery.start(arguments, folder / "output", environment).wait() == 0, (folder / "output").read_text()
    return read_log(folder / "log"), folder / "store", folder / "run" / "checkpoints"


def finished(lines, checkpoints):
    """The newest step that a run counts on: it has its name, and the removal of the one before it has begun."""
    named = 0
    for line in lines:
        if line.startswith(f"rename {checkpoints}/") and "/trash/" in line:
            named = int(line.rpartition("/")[2]) + 1
    return named


def newest_whole(folder):
    """The newest step that can be read; 0 if there is none."""
    steps = Steps(folder)
    for step in reversed(steps.listed()):
        try:
            return steps.read(step).step
        except BrokenError:
            continue
    return 0


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("harsh", [True, False], ids=["nothing_else", "some_of_the_rest"])
def test_a_cut_leaves_the_newest_step_that_the_run_counts_on(log, tmp_path, number, harsh):
    lines, store, checkpoints = log
    chance = random.Random(number)
    for cut in cuts(lines, number, number):
        power = Power(checkpoints, lines[:cut], store)
        power.rebuild(tmp_path / str(cut), None if harsh else chance)
        assert newest_whole(tmp_path / str(cut)) >= finished(lines[:cut], checkpoints), lines[cut - 1]


def test_every_file_of_a_step_is_on_the_disk_before_the_step_has_its_name(log, tmp_path):
    lines, store, checkpoints = log
    for cut, line in enumerate(lines, 1):
        if line.startswith(f"rename {checkpoints}/") and line.split("\t")[0].endswith(".saving"):
            # The rename itself is still missing.
            step = int(line.rpartition("/")[2])
            Power(checkpoints, [*lines[:cut], f"syncdir {checkpoints}"], store).rebuild(tmp_path / str(step))
            assert Steps(tmp_path / str(step)).read(step).step == step
    assert newest_whole(tmp_path / str(STEPS)) == STEPS
