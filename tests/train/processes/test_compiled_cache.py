"""Runs whose folder of compiled programs was harmed: the losses are the same, and each program that was removed is named."""

import os
import signal

import pytest
from runs import Processes, rows

STEPS = 3
EVALUATION = ["data.eval_tokens=600", "train.eval_every=2", "train.eval_batches=2"]


def losses(folder):
    """The loss of each step and of each evaluation."""
    return [(row["step"], row.get("loss"), row.get("eval_loss")) for row in rows(folder / "metrics.jsonl")]


def programs(cache):
    return sorted(path for path in cache.iterdir() if path.name.endswith("-cache"))


@pytest.fixture(scope="module")
def started(nursery, tiny_file, tmp_path_factory, pytestconfig):
    """Starts a run of its own with a folder of programs. Returns its exit code, its losses and the lines that it printed for a person."""

    def _started(cache, *overrides, kill=False, nursery=nursery, environment=None):
        folder = tmp_path_factory.mktemp("run")
        arguments = ["--config", str(tiny_file), f"run.dir={folder / 'run'}", f"xla.cache={cache}", f"train.steps={STEPS}", *EVALUATION]
        arguments += ["debug.faults=[{at_step: 1, kind: kill}]"] if kill else []
        command = [*arguments, *overrides] if nursery is not None else ["-m", "train", *arguments, *overrides]
        with Processes(folder, [command], pytestconfig.rootpath, nursery=nursery, environment=environment) as process:
            code = process.wait(0)
            output = process.output(0)
        return code, losses(folder / "run"), [line for line in output.splitlines() if line.startswith("jgt: ")]

    return _started


@pytest.fixture(scope="module")
def first(started, tmp_path_factory):
    """A folder that a first start has filled, and its losses.

    A test may harm it: the next start mends it. It is not copied, because JAX's keys depend on the path.
    """
    cache = tmp_path_factory.mktemp("programs")
    code, expected, lines = started(cache)
    assert (code, len(expected), lines) == (0, STEPS + 2, [])
    assert len(programs(cache)) > 2
    return cache, expected


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace(path):
    # By another whole program: of the ones in the folder, reading a pipe would wait for ever.
    path.write_bytes(next(other for other in programs(path.parent) if other != path and other.is_file()).read_bytes())


@pytest.mark.parametrize(
    "harms", [pytest.param([flip], id="a bit"), pytest.param([pipe, replace, cut], id="others", marks=pytest.mark.slow)]
)
def test_harmed_programs_are_named_removed_and_compiled_again(harms, first, started):
    cache, expected = first
    paths = programs(cache)
    for i, path in enumerate(paths):
        harms[i % len(harms)](path)
    code, found, lines = started(cache)
    assert (code, found) == (0, expected)
    assert len(lines) == len(paths)
    for path in paths:
        assert sum(str(path) in line and line.endswith("It was removed and is compiled again") for line in lines) == 1, lines
    before = [path.stat().st_mtime_ns for path in programs(cache)]
    assert started(cache) == (0, expected, [])
    assert [path.stat().st_mtime_ns for path in programs(cache)] == before


@pytest.mark.slow
def test_programs_of_a_start_that_died_in_its_first_step_are_compiled_again(first, started):
    cache, expected = first
    assert started(cache, kill=True)[0] == -signal.SIGKILL
    code, found, (line,) = started(cache)
    assert (code, found) == (0, expected)
    assert line.startswith(f"jgt: a start died before it finished a step with compiled programs from {cache}. They are compiled again: ")
    assert "jit_train_step" in line


NO_USER = """
import pwd


def getpwuid(number):
    raise KeyError(number)


pwd.getpwuid = getpwuid
"""


def with_package(folder, name, text):
    """The environment of a process that finds this package first."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]), "JAX_PLATFORMS": "cpu"}


def test_a_user_without_a_home_trains_without_a_cache(started, tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    environment = with_package(tmp_path / "packages", "sitecustomize", NO_USER)
    code, found, lines = started("auto", nursery=None, environment=environment)
    assert (code, len(found)) == (0, STEPS + 2)
    assert lines == [
        "jgt: compiled programs cannot be stored, because this user has no home folder. Every start compiles again. Set HOME or xla.cache"
    ]
