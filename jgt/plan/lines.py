"""Which line of the user's program an instruction comes from: the tables of files and stack frames in a compiled program's text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

_DIRECT = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OWN = str(Path(__file__).parents[1]) + "/"
"""jgt's own files: a program that it rewrote still comes from where it was written."""


class Lines:
    """The lines of a program; tables: the rows by number of FileNames, FileLocations and StackFrames."""

    def __init__(self, tables: Mapping[str, Mapping[int, str]]):
        self._tables = tables

    def of(self, metadata: str) -> str:
        """The file:line that an instruction's metadata tells; empty where it tells none."""
        if direct := _DIRECT.search(metadata):
            return _from_here(f"{direct[1]}:{direct[2] or 0}")
        found = _FRAME.search(metadata)
        return self._frames.get(int(found[1]), "") if found else ""

    @cached_property
    def _frames(self) -> dict[int, str]:
        """file:line by stack frame."""
        rows = {number: _fields(row) for number, row in self._tables.get("StackFrames", {}).items()}
        # Parents are numbered from one more than frames are; a frame without parent then names itself.
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

        return {number: _best(list(chain(number))) for number in rows}


def _best(lines: list[str]) -> str:
    """Of the lines from the innermost outwards the first that is neither in an installed package nor jgt's own, if there is one."""
    if lines[0].startswith(f"{_OWN}plan/"):
        # Nobody wrote it: where the plan was made is no answer.
        return ""
    own = [line for line in lines if "site-packages" not in line]
    return _from_here(next((line for line in own if not line.startswith(_OWN)), (own or lines)[0]))


def _from_here(source: str) -> str:
    """A path as one would type it."""
    return source.removeprefix(f"{Path.cwd()}/")


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
