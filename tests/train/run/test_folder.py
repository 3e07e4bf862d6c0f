"""A run directory resumes with the model, the data and the seed that it was started with."""

from pathlib import Path

import pytest

from jgt.document import InputError
from train.checkpoint import manifest
from train.config import load
from train.files.ends import InUseError
from train.run.directory.folder import lock_folder, move_earlier_run
from train.run.directory.history import begin_folder
from train.run.directory.identity import Resume, check_data, check_folder, check_places, check_weights, read_resume

FINGERPRINT = {"source": "text", "train_tokens": 100}


@pytest.fixture
def started(tiny):
    """A run whose directory already exists, with a checkpoint."""
    run = tiny()
    begin_folder(run, FINGERPRINT)
    save(run)
    return run


def save(run):
    """Makes a checkpoint, of which only the manifest is looked at."""
    step = run.config.run.path / "checkpoints" / "1"
    step.mkdir(parents=True)
    (step / manifest.NAME).write_text("{}")


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


def test_a_start_without_a_checkpoint_fixes_nothing(tiny):
    begin_folder(tiny(), FINGERPRINT)
    changed = tiny("model.layers=3", "data.eval_tokens=7", "run.seed=5")
    check_folder(changed, Resume())
    check_data(changed, {}, Resume())
    save(changed)
    assert len(problems(check_folder, changed, Resume())) == 3


def test_another_model_data_and_seed_are_named_at_once(tiny, started, tmp_path):
    changes = ("model.layers=3", "model.tied=true", "data.eval_tokens=7", "run.seed=5", "optimizer.name=muon")
    found = problems(check_folder, tiny(*changes), Resume())
    config = tmp_path / "run" / "config.yaml"
    assert [problem.partition(". Change it back")[0] for problem in found] == [
        f"command line: model.layers=3: model.layers: is 3, but {config} was started with 2",
        f"command line: model.tied=true: model.tied: is true, but {config} was started with false",
        f"command line: data.eval_tokens=7: data.eval_tokens: is 7, but {config} was started with 0",
        f"command line: run.seed=5: run.seed: is 5, but {config} was started with 0",
        f"command line: optimizer.name=muon: optimizer.name: is 'muon', but {config} was started with 'adamw'",
    ]
    assert found[0].endswith("Change it back, give the run another name (run.name=...), or allow it (--allow-change model.layers)")


def test_the_same_path_with_other_contents(tiny, started, tiny_file, tmp_path):
    (problem,) = problems(check_data, tiny(), {"source": "text", "train_tokens": 90, "eval_tokens": 10}, Resume())
    assert problem == (
        f"{tiny_file}:{load(tiny_file).where('data').rpartition(':')[2]}: data: is not the data that {tmp_path}/run was started with: "
        "eval_tokens was not there, is 10; train_tokens was 100, is 90. Give the run another name (run.name=...), "
        "or allow it (--allow-change data)"
    )


def test_files_of_the_same_size_with_other_contents(tiny, started):
    (problem,) = problems(check_data, tiny(), {"source": "text", "train_tokens": 100, "files_sha256": "a"}, Resume())
    assert "was started with: its contents differ. Give" in problem


def test_a_directory_has_one_run_at_a_time(tmp_path):
    second = lock_folder(tmp_path / "run", seconds=0.3)
    with lock_folder(tmp_path / "run"), pytest.raises(InUseError, match=r"another run is using .*run\. Wait until it ends"):
        second.__enter__()
    with lock_folder(tmp_path / "run"):
        pass


def test_the_directory_is_written_as_read(started, tmp_path):
    assert load(tmp_path / "run" / "config.yaml").config.model == started.config.model


# -- changes that are allowed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allow", [("model.layers", "model.tied"), ("model",), ("data", "model.tied", "model")])
def test_a_change_may_be_allowed_by_key_or_by_section(tiny, started, allow):
    check_folder(tiny("model.layers=3", "model.tied=true"), Resume(allow=allow))


def test_what_is_not_allowed_is_still_refused(tiny, started):
    found = problems(
        check_folder, tiny("model.layers=3", "model.tied=true", "run.seed=5"), Resume(allow=("model.tied", "run.seed", "model.lay"))
    )
    assert [problem.split(": ")[2] for problem in found] == ["model.layers"]


def test_other_data_may_be_allowed(tiny, started):
    check_data(tiny(), {"source": "text", "train_tokens": 90}, Resume(allow=("data",)))
    problems(check_data, tiny(), {"source": "text", "train_tokens": 90}, Resume(allow=("model", "run.seed")))


@pytest.mark.parametrize(("key", "near"), [("modle", "model"), ("dat", "data"), ("seed", "run.seed"), ("run", "run.seed")])
def test_a_misspelt_key_has_its_nearest_name(key, near):
    assert problems(read_resume, "auto", [key], Path()) == (
        f"command line: --allow-change: {key}: unknown key. Did you mean '{near}'? It takes these keys and the keys below them: "
        "model, data, run.seed, lora, optimizer.name, optimizer.train, code, checkpoint.weights, base",
    )


def test_a_key_that_no_file_has_cannot_be_allowed(tiny, started):
    found = problems(check_places, tiny(), Resume(allow=("model.layers", "model.layer", "data", "data.packin", "base")))
    assert found == (
        "command line: --allow-change: model.layer: unknown key. Did you mean 'layers'?",
        "command line: --allow-change: data.packin: unknown key. Did you mean 'packing'?",
    )


@pytest.mark.parametrize("key", ["train.batch", "steps", ""])
def test_keys_that_cannot_be_allowed(key):
    (problem,) = problems(read_resume, "auto", ["model.layers", key], Path())
    assert problem == (
        f"command line: --allow-change: {key}: is not a key that needs to be allowed. "
        "It takes these keys and the keys below them: model, data, run.seed, lora, optimizer.name, optimizer.train, code, "
        "checkpoint.weights, base"
    )


# -- what to go on from ----------------------------------------------------------------------------------------------


def test_the_command_line_says_what_to_go_on_from(tmp_path):
    assert read_resume("auto", [], tmp_path) == Resume()
    assert read_resume("never", ["run.seed"], tmp_path) == Resume(never=True, allow=("run.seed",))
    assert read_resume(str(tmp_path), ["data.path"], tmp_path) == Resume(path=tmp_path, allow=("data.path",))


def test_a_run_with_checkpoints_of_its_own_needs_no_origin(tmp_path):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    gone = tmp_path / "gone"
    assert read_resume(str(gone), [], tmp_path / "run" / "checkpoints") == Resume(path=gone)


def test_all_that_is_wrong_with_it_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints" / "3.saving").mkdir(parents=True)
    first, second = problems(read_resume, str(tmp_path / "file"), ["optimizer"], tmp_path / "run")
    assert first.startswith("command line: --allow-change: optimizer: ")
    assert (
        second
        == f"command line: --resume: {tmp_path / 'file'}: is not a folder. Write auto, never, a run directory or one of its checkpoints"
    )


def test_a_run_that_begins_again_is_compared_with_nothing(tiny, started):
    check_folder(tiny("model.layers=3"), Resume(never=True))
    check_data(tiny(), {"source": "other"}, Resume(never=True))


@pytest.mark.parametrize("where", ["nowhere", "empty", "empty/7"])
def test_weights_that_do_not_exist_are_refused_before_anything_else(where, tiny, started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    # It would resume from them, and not read the weights.
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (problem,) = problems(check_weights, tiny(f"checkpoint.weights={where}"))
    why = "no checkpoint in empty" if where == "empty" else f"{where} does not exist"
    assert problem == (
        f"command line: checkpoint.weights={where}: checkpoint.weights: {why}. "
        "Name a run directory, or one of the steps in its checkpoints/"
    )


def test_weights_that_exist_are_not_read_yet(tiny, tmp_path):
    (tmp_path / "other" / "checkpoints" / "7").mkdir(parents=True)
    for path in ("other", "other/checkpoints", "other/checkpoints/7"):
        (tmp_path / "other" / "checkpoints" / "7" / "manifest.json").touch()
        check_weights(tiny(f"checkpoint.weights={tmp_path / path}"))
    check_weights(tiny())


# -- making way ------------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_earlier_run_makes_way_but_for_its_encoded_text_and_open_logs(started, tmp_path):
    run = tmp_path / "run"
    for name in ("data", "logs"):
        (run / name).mkdir()
    assert move_earlier_run(run) == tmp_path / "run.1"
    assert names(run) == ["data", "logs"]
    assert names(tmp_path / "run.1") == ["checkpoints", "config.yaml", "data.json"]


def test_each_earlier_run_has_a_folder_of_its_own(tiny, tmp_path):
    for number in (1, 2, 3):
        begin_folder(tiny(f"run.seed={number}"), FINGERPRINT)
        assert move_earlier_run(tmp_path / "run") == tmp_path / f"run.{number}"
    assert [load(tmp_path / f"run.{number}" / "config.yaml").config.run.seed for number in (1, 2, 3)] == [1, 2, 3]


def test_where_nothing_was_nothing_makes_way(tmp_path):
    assert move_earlier_run(tmp_path / "run") is None
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "logs").mkdir()
    assert move_earlier_run(tmp_path / "run") is None
    assert names(tmp_path) == ["run"]


def test_a_changed_working_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with lock_folder(Path("run")) as lock:
        lock.check()
        monkeypatch.chdir(tmp_path / "other")
        with pytest.raises(InUseError, match=r"own code has changed the working directory from .* to .*other, and run\.dir is relative"):
            lock.check()
        monkeypatch.chdir(tmp_path)
        lock.check()
