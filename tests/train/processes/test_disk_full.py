"""A disk that is full during a save, on a real small file system: training continues, and so do saves once there is room."""

import shutil

import pytest

from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.saved import find_checkpoint
from train.run.train import train


@pytest.fixture
def run_on(tiny, small_disk, monkeypatch):
    """The directory of a run on that disk, which has only `left` bytes free from the save of step `full_from` to that of `free_from`."""
    plain, ballast = Checkpoints.save, small_disk / "ballast"

    def _run_on(left, *, full_from, free_from):
        def save(self, state, step, *more):
            if step == full_from:
                self.wait()
                ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - left))
            elif step == free_from:
                ballast.unlink()
            plain(self, state, step, *more)

        monkeypatch.setattr(Checkpoints, "save", save)
        run = tiny(f"run.dir={small_disk / 'run'}", "train.steps=10", "checkpoint.every=1", "checkpoint.keep=3")
        train(run)
        return run.config.run.path

    return _run_on


def check(folder, read_rows, capsys):
    failed = [event["step"] for event in read_rows(folder / "events.jsonl") if event["phase"] == "save_failed"]
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(1, 11))
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [8, 9, 10]
    assert find_checkpoint(folder)[0].manifest.step == 10
    assert capsys.readouterr().err.count("a checkpoint could not be saved") == len(failed)
    return failed


def test_a_save_that_would_not_fit_is_not_begun(run_on, read_rows, capsys):
    assert check(run_on(300_000, full_from=4, free_from=7), read_rows, capsys) == [4, 5, 6]


# What Orbax leaves behind when it fails complains that its event loop is gone.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_finds_the_disk_full_half_way_is_undone(run_on, read_rows, capsys, caplog, monkeypatch):
    monkeypatch.setattr("train.run.faults.Faults.free", lambda self, folder: 10**12)
    failed = check(run_on(100_000, full_from=4, free_from=7), read_rows, capsys)
    assert failed and set(failed) <= {4, 5, 6, 7}
    assert not caplog.records, "SaveError says what Orbax would log in hundreds of lines"
