"""Which line of the user's program an instruction comes from.

An instruction names a stack frame, and tables in the header of the text say what the frame is (an excerpt):

    FileNames                       FileLocations
    1 "my_step.py"                  1 {file_name_id=1 function_name_id=1 line=97 end_line=97 column=4 end_column=4}
    2 "my_model.py"                 2 {file_name_id=2 function_name_id=2 line=44 end_line=44 column=19 end_column=19}
    StackFrames
    1 {file_location_id=1 parent_frame_id=1}
    2 {file_location_id=2 parent_frame_id=2}

    %dot = f32[2,32]{1,0} dot(...), metadata={op_name="..." stack_frame_id=2}

Frame 2 is line 44 of my_model.py, called from frame 1, line 97 of my_step.py. XLA prints a parent as its frame's number plus one, so that a
frame without a parent appears to be its own. The answer is the innermost line that is neither in an installed package nor in jgt. Older
versions of XLA write `source_file="..." source_line=44` instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

_DIRECT = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_JGT = str(Path(__file__).parents[2]) + "/"
"""The folder of jgt's own files. jgt rewrites programs, but what it rewrote still comes from where the user wrote it."""


class Lines:
    """The source lines of a program. tables: the rows by number of FileNames, FileLocations and StackFrames."""

    def __init__(self, tables: Mapping[str, Mapping[int, str]]):
        self._tables = tables

    def of(self, metadata: str) -> str:
        """The file:line for an instruction's metadata; empty if it has none."""
        if direct := _DIRECT.search(metadata):
            return _relative(f"{direct[1]}:{direct[2] or 0}")
        found = _FRAME.search(metadata)
        return self._frames.get(int(found[1]), "") if found else ""

    @cached_property
    def _frames(self) -> dict[int, str]:
        rows = {number: _fields(row) for number, row in self._tables.get("StackFrames", {}).items()}
        # Only if parents are printed plus one does some frame appear to be its own parent.
        shift = int(any(row.get("parent_frame_id") == number for number, row in rows.items()))
        locations = {number: _fields(row) for number, row in self._tables.get("FileLocations", {}).items()}
        files = {number: row.strip('"') for number, row in self._tables.get("FileNames", {}).items()}

        def chain(number: int) -> Iterator[str]:
            seen: set[int] = set()
            while number in rows and number not in seen:
                seen.add(number)
                location = locations[rows[number]["file_location_id"]]
                yield f"{files[location['file_name_id']]}:{location['line']}"
                number = rows[number].get("parent_frame_id", 0) - shift

        return {number: _users_line(list(chain(number))) for number in rows}


def _users_line(lines: list[str]) -> str:
    """Among the lines of a stack, innermost first: the first of the user's, otherwise jgt's, otherwise the innermost."""
    if lines[0].startswith(f"{_JGT}planner/"):
        # The instruction belongs to the step as a whole, not to any line: the frame is the planner's call that compiled it.
        return ""
    ours = [line for line in lines if "site-packages" not in line]
    return _relative(next((line for line in ours if not line.startswith(_JGT)), (ours or lines)[0]))


def _relative(source: str) -> str:
    """A path below the current directory, as one would type it; other paths are unchanged."""
    return source.removeprefix(f"{Path.cwd()}/")


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
