"""Prints the tests of the rooms that a change touches, for a run of their slow ones.

    python .ci/touched.py [BASE]       # for the changes since BASE; without it, or if this clone lacks it, those of the last commit

A room is a folder below jgt/ or train/, and its tests are the folder of that name below tests/ or tests/train/.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tests_of(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The folders and files of tests for these changed files, each once."""
    found = dict[str, None]()
    for path in changed:
        package, *parts = Path(path).parts
        is_test = package == "tests" and parts[-1].startswith("test_") and parts[-1].endswith(".py")
        folder = {"jgt": "tests", "train": "tests/train"}.get(package)
        tests = path if is_test else f"{folder}/{parts[0]}" if folder and len(parts) > 1 else ""
        if tests and (root / tests).exists():
            found[tests] = None
    return [tests for tests in found if not any(f"{tests}/".startswith(f"{other}/") for other in found if other != tests)]


def main() -> None:
    """Prints them on one line."""
    for base in [*sys.argv[1:2], "HEAD~1"]:
        done = subprocess.run(["git", "diff", "--name-only", base, "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        if base and done.returncode == 0:
            print(*tests_of(done.stdout.splitlines()))
            return


if __name__ == "__main__":
    main()
