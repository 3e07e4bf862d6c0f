"""The rules files that ship: at most 30 lines, their specs as reviewed, and a layout that XLA partitions without complaint."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from jgt.planner.hlo.instruction import COLLECTIVES
from jgt.planner.hlo.text import Module
from jgt.program.dims import show_dims
from jgt.sharding.partitioner.corrected import without_faults
from train.config import load
from train.setup import prepare

ROOT = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).parent.parent / "goldens" / "rules.txt"
MESHES = {
    "replicated": "{data: 8}",
    "zero1": "{data: 8}",
    "fsdp": "{fsdp: 8}",
    "any": "{fsdp: 8}",
    "hybrid": "{replica: 2, fsdp: 4}",
    "tensor": "{data: 4, tensor: 2}",
    "sequence": "{data: 4, tensor: 2}",
    "fsdp_tensor": "{data: 2, fsdp: 2, tensor: 2}",
    "fsdp_sequence": "{data: 2, fsdp: 2, tensor: 2}",
    "overlap": "{data: 2, fsdp: 2, tensor: 2}",
    "pipeline": "{data: 2, fsdp: 1, stage: 2, tensor: 2}",
    "pipeline_sequence": "{data: 2, fsdp: 1, stage: 2, tensor: 2}",
    "context": "{data: 2, fsdp: 1, seq: 4, tensor: 1}",
    "experts": "{data: 2, fsdp: 2, expert: 2}",
}
ALWAYS = ("sequence", "fsdp_tensor", "pipeline")
TINY = ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=4", "model.ffn=64", "model.seq=32", "train.batch=16"]


def setup_of(rules, kind):
    overrides = [f"rules=rules/{rules}.yaml", f"mesh={MESHES[rules]}", f"model.kind={kind}", *TINY]
    experts = ["model.experts={count: 4, ffn: 32, shared: 1}"] if rules == "experts" else []
    return prepare(load(ROOT / "configs/quickstart.yaml", [*overrides, *experts]))


def facts():
    for rules in MESHES:
        for kind in ("llama",) if rules == "experts" else ("llama", "gpt"):
            for p in setup_of(rules, kind).storage.model.parameters:
                state = "" if p.optimizer_dims == p.dims else f" state {show_dims(p.optimizer_dims)}"
                yield f"{rules} {kind} {p.path} {','.join(p.signals)} {p.spec}{state}"


def test_every_file_is_covered():
    assert {path.stem for path in (ROOT / "configs/rules").glob("*.yaml")} == set(MESHES)


@pytest.mark.parametrize("rules", MESHES)
def test_at_most_thirty_lines(rules):
    assert len((ROOT / f"configs/rules/{rules}.yaml").read_text().splitlines()) <= 30


def test_specs_are_as_reviewed():
    found = "".join(f"{fact}\n" for fact in facts())
    if os.environ.get("UPDATE_GOLDENS"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text(), "look at the difference, then run again with UPDATE_GOLDENS=1"


@pytest.mark.slow
@pytest.mark.parametrize("rules", MESHES)
def test_no_operation_needs_another_layout_to_be_computed_rightly(rules):
    for kind in ("llama",) if rules == "experts" else ("llama", "gpt"):
        module = setup_of(rules, kind).lower_train_step().compiler_ir("stablehlo")
        assert without_faults(module, "gpu") is module, kind


@pytest.mark.parametrize("rules", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in MESHES])
def test_xla_partitions_without_complaint(rules):
    setup = setup_of(rules, "llama")
    with captured_stderr() as file:
        compiled = setup.compile_train_step()
        file.seek(0)
        written = file.read().decode()
    assert "rematerialization" not in written
    assert any(i.kind in COLLECTIVES for i in Module.parse(compiled.as_text()).instructions()), "a sharded step talks"


@contextlib.contextmanager
def captured_stderr():
    """A file with everything that is written to file descriptor 2, also by C++ code."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)
