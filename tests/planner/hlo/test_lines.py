"""Source lines from the tables of files and stack frames in a compiled program's header."""

from pathlib import Path

import pytest

import jgt.planner.compiled
import jgt.signal
from jgt.planner.hlo.text import Lines

PLANNER, JGT = jgt.planner.compiled.__file__, jgt.signal.__file__
PACKAGE, USER = "/venv/lib/site-packages/flax/nnx/module.py", "/elsewhere/model.py"


def lines(*stack, shift=1):
    """The lines of a program with one stack, innermost file first. Frames are numbered from the outermost, frame n at line 10 n."""
    numbers = range(len(stack), 0, -1)
    return Lines(
        {
            "FileNames": {n: f'"{file}"' for n, file in zip(numbers, stack, strict=True)},
            "FileLocations": {n: f"{{file_name_id={n} function_name_id=1 line={10 * n} end_line=0 column=1}}" for n in numbers},
            "StackFrames": {n: f"{{file_location_id={n} parent_frame_id={n - 1 + shift}}}" for n in numbers},
        }
    )


@pytest.mark.parametrize("shift", [0, 1], ids=["parents by number", "parents by number plus one"])
@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([USER], f"{USER}:10"),
        ([PACKAGE, JGT, USER, "/elsewhere/main.py"], f"{USER}:20"),
        ([PACKAGE, JGT], f"{JGT}:10"),
        ([PACKAGE], f"{PACKAGE}:10"),
        ([PLANNER, USER], ""),
    ],
    ids=[
        "the user's",
        "the user's innermost",
        "jgt's, if there is none",
        "a package's, if there is none",
        "none for the planner's own call",
    ],
)
def test_the_line_of_a_stack(stack, line, shift):
    found = lines(*stack, shift=shift).of(f'metadata={{op_name="x" stack_frame_id={len(stack)}}}')
    assert found == line.removeprefix(f"{Path.cwd()}/")


def test_a_line_without_tables():
    assert Lines({}).of('metadata={op_name="x" stack_frame_id=3}') == ""
    assert Lines({}).of("metadata={}") == ""
