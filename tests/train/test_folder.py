"""A run directory goes on with the model, the data and the seed that it was started with."""

import pytest

from jgt.document import InputError
from train.config import load
from train.folder import InUseError, Resume, check_data, check_folder, held, write_folder

FINGERPRINT = {"source": "text", "train_tokens": 100}


@pytest.fixture
def started(tiny):
    """A run whose directory was started."""
    run = tiny()
    write_folder(run, FINGERPRINT)
    return run


def problems(call, *arguments):
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return caught.value.problems


def test_the_same_run_goes_on(tiny, started):
    check_folder(tiny(), Resume())
    check_data(tiny(), FINGERPRINT, Resume())


def test_a_directory_that_was_not_started(tiny):
    check_folder(tiny(), Resume())
    check_data(tiny(), FINGERPRINT, Resume())


@pytest.mark.parametrize(
    "override", ["train.steps=7", "train.batch=8", "optimizer.lr=1", "mesh={data: 8}", "run.name=other", "devices.virtual_cpu=3"]
)
def test_the_rest_may_change(tiny, started, override):
    check_folder(tiny(override), Resume())


def test_another_model_data_and_seed_are_named_at_once(tiny, started, tmp_path):
    found = problems(check_folder, tiny("model.layers=3", "model.tied=true", "data.eval_tokens=7", "run.seed=5"), Resume())
    config = tmp_path / "run" / "config.yaml"
    assert [problem.partition(". Change it back")[0] for problem in found] == [
        f"command line: model.layers=3: model.layers: is 3, but {config} was started with 2",
        f"command line: model.tied=true: model.tied: is True, but {config} was started with False",
        f"command line: data.eval_tokens=7: data.eval_tokens: is 7, but {config} was started with 0",
        f"command line: run.seed=5: run.seed: is 5, but {config} was started with 0",
    ]
    assert found[0].endswith("Change it back, give the run another name (run.name=...), or allow it (--allow-change model.layers)")


def test_the_same_path_with_other_contents(tiny, started, tiny_file, tmp_path):
    (problem,) = problems(check_data, tiny(), {"source": "text", "train_tokens": 90, "eval_tokens": 10}, Resume())
    assert problem == (
        f"{tiny_file}:{load(tiny_file).where('data').rpartition(':')[2]}: data: is not the data that {tmp_path}/run was started with: "
        "eval_tokens was None, is 10; train_tokens was 100, is 90. Give the run another name (run.name=...), or allow it (--allow-change data)"
    )


def test_a_directory_has_one_run_at_a_time(tmp_path):
    second = held(tmp_path / "run", seconds=0.3)
    with held(tmp_path / "run"), pytest.raises(InUseError, match=r"another run is at work in .*run\. Wait for its end"):
        second.__enter__()
    with held(tmp_path / "run"):
        pass


def test_the_directory_is_written_as_read(started, tmp_path):
    assert load(tmp_path / "run" / "config.yaml").config.model == started.config.model
