"""The facts read from programs as each supported jaxlib writes them, one line for each fact. The installed jaxlib does not matter."""

import os

import pytest
from counted import GOLDENS, MESHES, PROGRAMS, TARGETS

from jgt.planner.hlo.collectives import collectives
from jgt.planner.hlo.text import Module
from jgt.planner.hlo.trips import unknown_loops
from jgt.planner.timeline import Timeline

JAXLIBS = ["0.10.2", "0.12.0.1"]
ROWS = GOLDENS / "rows.txt"


def facts(path):
    name, target, version = path.stem.split(".", 2)
    module, mesh = Module.parse(path.read_text()), MESHES[name]
    for row in collectives(module, mesh, 8):
        sent = f"{row.count} {row.kind} of {row.dtype} over {'+'.join(row.axes)} by {row.group}, {row.bytes} bytes each"
        yield f"{name} {target} {version}: {sent}; {row.signal} {row.phase} {row.source}"
    for (signal, phase), cost in sorted(Timeline(module, mesh, 8, None).step().costs.items()):
        if cost.flops:
            yield f"{name} {target} {version}: {cost.flops:g} FLOPs; {signal} {phase}"


def test_every_program_exists_for_every_target_and_jaxlib():
    names = {f"{name}.{target}.{version}.txt" for name in PROGRAMS for target in TARGETS for version in JAXLIBS}
    assert {path.name for path in GOLDENS.glob("*.txt")} == {*names, ROWS.name}


def test_rows_are_as_reviewed():
    found = "".join(f"{fact}\n" for path in sorted(GOLDENS.glob("*.*.txt")) for fact in facts(path))
    if os.environ.get("UPDATE_GOLDENS"):
        ROWS.write_text(found)
    assert found == ROWS.read_text(), "look at the difference, then run again with UPDATE_GOLDENS=1"


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.*.txt")), ids=lambda path: path.stem)
def test_loops_have_known_lengths_and_texts_no_paths_of_a_machine(path):
    text = path.read_text()
    assert list(unknown_loops(Module.parse(text))) == []
    assert '"/' not in text, "paths from the root of the repository only"
