"""Runs of a tiny decoder on a tiny text, compiled without optimisation, because XLA's code generator is not under test."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from disk import build
from jax.experimental.compilation_cache import compilation_cache
from runs import Nursery

from jgt import document
from train.config import Run, load
from train.records.console import Screen
from train.run.saves import Saves
from train.run.train import train

TINY = {
    "run": {"name": "tiny"},
    "model": {"kind": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 256, "seq": 32},
    "optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 2},
    "train": {"steps": 20, "batch": 16},
}


@pytest.fixture(scope="package", autouse=True)
def _compiled_quickly(tmp_path_factory) -> Iterator[None]:
    """Compiles each program once: when a run is started again, its program comes from the cache."""
    _configure(quick=True, folder=str(tmp_path_factory.mktemp("compiled")), min_seconds=0.0)
    yield
    _configure(quick=False, folder=None, min_seconds=1.0)


def _configure(*, quick: bool, folder: str | None, min_seconds: float) -> None:
    jax.config.update("jax_disable_most_optimizations", quick)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)
    compilation_cache.reset_cache()


@pytest.fixture(scope="package")
def nursery(tmp_path_factory, pytestconfig) -> Iterator[Nursery]:
    """Starts runs in their own processes, by fork."""
    with Nursery(tmp_path_factory.mktemp("compiled"), pytestconfig.rootpath) as nursery:
        yield nursery


@pytest.fixture(scope="package")
def disk_library(tmp_path_factory) -> Path:
    """tests/helpers/disk.c as a library for LD_PRELOAD."""
    return build(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="package")
def disk_nursery(tmp_path_factory, pytestconfig, disk_library) -> Iterator[Nursery]:
    """A nursery of runs whose disk is watched or fails, as the environment of each run says."""
    with Nursery(tmp_path_factory.mktemp("compiled"), pytestconfig.rootpath, {"LD_PRELOAD": str(disk_library)}) as nursery:
        yield nursery


@pytest.fixture(scope="package")
def text_file(tmp_path_factory) -> Path:
    """About 30 kB of digits and spaces."""
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(" ".join(str(i * i) for i in range(4000)))
    return path


@pytest.fixture(scope="package")
def tiny_file(tmp_path_factory, text_file) -> Path:
    """The YAML file of a run on one device, without rules."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(document.dump({**TINY, "mesh": {"data": 1}, "data": {"source": "text", "path": str(text_file), "eval_tokens": 0}}))
    return path


@pytest.fixture
def tiny(tiny_file, tmp_path) -> Callable[..., Run]:
    """The tiny run with overrides; its directory is tmp_path/run."""
    return lambda *overrides: load(tiny_file, [f"run.dir={tmp_path / 'run'}", *overrides])


@pytest.fixture(scope="package")
def earlier(tiny_file, tmp_path_factory) -> Path:
    """The directory of a tiny run of six steps with the checkpoints of steps 2, 4 and 6, which no test changes."""
    folder = tmp_path_factory.mktemp("earlier")
    train(load(tiny_file, [f"run.dir={folder}", "train.steps=6", "checkpoint.every=2"]))
    return folder


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A folder with its own file system of six megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def stopped_at(monkeypatch):
    """A context in which a run ends once a step is logged, and saves nothing, as if it were killed."""

    class StoppedError(Exception):
        pass

    @contextlib.contextmanager
    def _stopped_at(last):
        plain = Screen.step

        def step(self, step, total, metrics):
            plain(self, step, total, metrics)
            if step == last:
                raise StoppedError

        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            patch.setattr(Screen, "step", step)
            patch.setattr(Saves, "rescue", lambda self, progress, position, error: None)
            yield

    return _stopped_at


@pytest.fixture
def rules_dir(root) -> Path:
    """The rules that come with the repository."""
    return Path(root) / "configs" / "rules"


@pytest.fixture
def read_rows() -> Callable[[Path], list[dict]]:
    """Reads a .jsonl file."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
