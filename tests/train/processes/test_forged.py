"""Checkpoints whose checksums are right and whose contents are not: set aside with a line if an older one serves, otherwise refused."""

import dataclasses
import functools
import json
import shutil

import pytest

from train.checkpoint import manifest
from train.checkpoint.contents import file_entries
from train.files.ends import Exit

STEPS = 4
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def finished(nursery, tiny_file, tmp_path_factory):
    """Trains a run with two checkpoints, once for the same options. Returns its folder."""

    @functools.cache
    def _finished(*options):
        folder = tmp_path_factory.mktemp("finished")
        arguments = ["--config", str(tiny_file), f"run.dir={folder / 'run'}", f"train.steps={STEPS}", "checkpoint.every=2", *options]
        assert nursery.start(arguments, folder / "log").wait() == 0
        return folder / "run"

    return _finished


@pytest.fixture
def forged(nursery, tiny_file, finished, tmp_path):
    """Forges steps of a copy of the run, makes their checksums anew, and starts it again. Returns exit code and output."""

    def _forged(forge, steps, *options):
        folder = tmp_path / "run"
        shutil.copytree(finished(), folder)
        for number in steps:
            forge(folder / "checkpoints" / str(number), lambda: finished("model.ffn=32") / "checkpoints" / str(number))
        arguments = ["--config", str(tiny_file), f"run.dir={folder}", f"train.steps={STEPS}", "checkpoint.every=2", *options]
        return nursery.start(arguments, tmp_path / "log").wait(), (tmp_path / "log").read_text()

    return _forged


def checksums_anew(step):
    """Makes the checksums in a manifest those of the files."""
    path = step / manifest.NAME
    values = json.loads(path.read_text())
    values["files"] = [dataclasses.asdict(entry) for entry in file_entries(step, sha256=False)]
    path.write_text(json.dumps(manifest.sealed(values)))


def metadata(text):
    """Replaces Orbax' description of the arrays."""

    def forge(step, other):
        (step / "state" / "_METADATA").write_text(text)
        checksums_anew(step)

    return forge


def type_of_os_system(step, other):
    path = step / "state" / "_METADATA"
    path.write_text(path.read_text().replace('"jax.Array"', '"os.system"'))
    checksums_anew(step)


def other_arrays(step, other):
    shutil.rmtree(step / "state")
    shutil.copytree(other() / "state", step / "state")
    checksums_anew(step)


def cut(name):
    """Cuts a file of Orbax."""

    def forge(step, other):
        path = step / "state" / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        checksums_anew(step)

    return forge


def samples(step, other):
    path = step / manifest.NAME
    path.write_text(json.dumps(manifest.sealed(json.loads(path.read_text()) | {"samples": (1 << 62) - 1})))


FORGERIES = {
    "arrays of other shapes": other_arrays,
    "metadata nested deeply": metadata(DEEP),
    "metadata of rubbish": metadata("\x00rubbish"),
    "metadata of a list": metadata("[1, 2]"),
    "metadata of nothing": metadata('{"tree_metadata": {}}'),
    "a cut manifest of Orbax": cut("manifest.ocdbt"),
    "samples": samples,
}
ALWAYS = ("arrays of other shapes", "metadata nested deeply")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FORGERIES])
def test_a_forged_step_is_set_aside_and_the_older_one_used(forged, tmp_path, name):
    code, output = forged(FORGERIES[name], [4])
    assert code == Exit.DONE, output
    assert "jgt: the checkpoint of step 4 " in output and f"was renamed to {tmp_path}/run/checkpoints/4.broken" in output
    assert "Resumed from step 2" in output and "Traceback" not in output
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4", "4.broken"]


@pytest.mark.slow
def test_a_type_is_never_imported(forged, tmp_path):
    code, output = forged(type_of_os_system, [4])
    assert code == Exit.DONE and "Traceback" not in output


def test_where_no_step_can_be_restored_the_start_is_refused_and_nothing_changed(forged, tmp_path):
    code, output = forged(metadata("rubbish"), [2, 4])
    assert code == Exit.INPUT, output
    assert output.count(": this checkpoint cannot be restored (") == 2 and "Traceback" not in output
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') == STEPS


def test_another_model_is_no_forgery(forged, tmp_path):
    code, output = forged(lambda step, other: None, [], "model.ffn=32", "--allow-change", "model.ffn")
    assert code == Exit.INPUT and "in this run. Give the run another name" in output
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]


# -- signatures --------------------------------------------------------------------------------------------------


def signed(folder):
    """A key's file as an option."""
    (folder / "key").write_text("a" * 32 + "\n")
    return f"checkpoint.key={folder / 'key'}"


def test_a_step_that_is_not_signed_is_set_aside(forged, nursery, tiny_file, tmp_path):
    key = signed(tmp_path)
    # The first start with a key has only unsigned steps to choose from: it must be told what to do with them.
    code, output = forged(lambda step, other: None, [], key)
    assert code == Exit.INPUT and output.count("this checkpoint is not trusted (it is not signed)") == 2, output
    folder = tmp_path / "new"
    arguments = ["--config", str(tiny_file), f"run.dir={folder}", f"train.steps={STEPS}", "checkpoint.every=2", key]
    assert nursery.start(arguments, tmp_path / "log").wait() == Exit.DONE
    values = json.loads((folder / "checkpoints" / "4" / manifest.NAME).read_text())
    assert len(values["signature"]) == 64 and all(entry["sha256"] for entry in values["files"])
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file()) + (tmp_path / "log").read_bytes()
    assert b"a" * 32 not in everything
    path = folder / "checkpoints" / "4" / manifest.NAME
    path.write_text(json.dumps(manifest.sealed(values | {"samples": 0})))
    assert nursery.start(arguments, tmp_path / "log").wait() == Exit.DONE
    output = (tmp_path / "log").read_text()
    assert "the checkpoint of step 4 is not trusted (its signature does not match checkpoint.key); it is not used" in output
    assert "Resumed from step 2" in output


def test_a_key_that_is_missing_ends_a_start(nursery, tiny_file, tmp_path):
    arguments = ["--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", "checkpoint.key=env:JGT_NO_SUCH_KEY"]
    assert nursery.start(arguments, tmp_path / "log").wait() == Exit.INPUT
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert ": checkpoint.key: the environment variable JGT_NO_SUCH_KEY is not set. Name a file with a key of 16 to 4096 bytes" in line
    assert not (tmp_path / "run").exists()
