"""Prints how many lines of code each room has, beside its budget, and exits with 1 if a room has more.

    python .ci/budget.py

A room is a folder or a file directly below jgt/ or train/. A line of code is a line with something other than a comment, a docstring
or blanks. `.ci/budget.txt` has the budgets, in steps of 25. A commit that raises one says why.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".txt")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """The number of lines of a file that carry code."""
    with path.open("rb") as file:
        lines = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in _LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(lines - docstring_lines(path))


def docstring_lines(path: Path) -> set[int]:
    """The lines of the docstrings of a file, and of other strings that stand alone."""
    alone = (
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for text in alone for line in range(text.lineno, text.end_lineno + 1)}


def rooms() -> dict[str, tuple[int, int]]:
    """The lines and the lines of code of each room."""
    counted: dict[str, tuple[int, int]] = {}
    for package in ("jgt", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            room = "/".join(path.relative_to(ROOT).parts[:2])
            lines, code = counted.get(room, (0, 0))
            counted[room] = lines + len(path.read_text().splitlines()), code + code_lines(path)
    return counted


def budgets() -> dict[str, int]:
    """The lines of code that each room may have."""
    rows = (line.split() for line in BUDGET.read_text().splitlines() if line and not line.startswith("#"))
    return {room: int(code) for room, code in rows}


def main() -> int:
    """The exit code: 1 if a room has more lines of code than its budget, or has no budget."""
    counted, allowed = rooms(), budgets()
    for room, (lines, code) in counted.items():
        over = "" if code <= allowed.get(room, 0) else "   over its budget"
        print(f"{room:<28}{lines:>7,} lines{code:>7,} of code{allowed.get(room, 0):>7,} allowed{over}")
    print(f"{'in all':<28}{sum(l for l, _ in counted.values()):>7,} lines{sum(c for _, c in counted.values()):>7,} of code")
    return int(any(code > allowed.get(room, 0) for room, (_, code) in counted.items()))


if __name__ == "__main__":
    sys.exit(main())
