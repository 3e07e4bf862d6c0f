"""Runs of a tiny decoder on a tiny text, compiled without optimisation: what is tested is not XLA's code generator."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jgt import document
from train.config import Run, load

TINY = {
    "run": {"name": "tiny"},
    "model": {"kind": "llama", "layers": 2, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 256, "seq": 32},
    "optimizer": {"lr": 3e-3, "schedule": "constant", "warmup": 2},
    "train": {"steps": 20, "batch": 16},
}


@pytest.fixture(scope="package", autouse=True)
def _compiled_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="package")
def text_file(tmp_path_factory) -> Path:
    """Some 30 kB of digits and spaces."""
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(" ".join(str(i * i) for i in range(4000)))
    return path


@pytest.fixture(scope="package")
def tiny_file(tmp_path_factory, text_file) -> Path:
    """The YAML file of a run on one device, without rules."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(document.dump({**TINY, "data": {"source": "text", "path": str(text_file), "eval_tokens": 0}}))
    return path


@pytest.fixture
def tiny(tiny_file, tmp_path) -> Callable[..., Run]:
    """The tiny run with overrides; its directory is tmp_path/run."""
    return lambda *overrides: load(tiny_file, [f"run.dir={tmp_path / 'run'}", *overrides])


@pytest.fixture
def rules_dir(root) -> Path:
    """The rules that come with the repository."""
    return Path(root) / "configs" / "rules"


@pytest.fixture
def read_rows() -> Callable[[Path], list[dict]]:
    """Reads a .jsonl file."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
