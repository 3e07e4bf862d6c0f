"""What CI runs beside the quick tests: those of the rooms that a change touches."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("touched", ROOT / ".ci" / "touched.py")
assert spec is not None and spec.loader is not None
touched = importlib.util.module_from_spec(spec)
spec.loader.exec_module(touched)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["jgt/rules/load.py", "jgt/rules/schema.py"], ["tests/rules"]),
        (["train/data/own/tars.py"], ["tests/train/data"]),
        (["tests/rules/test_bounds.py", "jgt/rules/load.py"], ["tests/rules"]),
        (["tests/test_wheel.py", "tests/slow.txt"], ["tests/test_wheel.py"]),
        (["jgt/signal.py", "docs/plan.md", "README.md", "train/gone/file.py"], []),
    ],
    ids=["a room", "a room of the trainer", "a test in a room", "a test beside the rooms", "no room"],
)
def test_the_tests_of_what_a_change_touches(changed, tests):
    assert touched.tests_of(changed) == tests


def test_every_room_has_a_folder_of_tests():
    without = {"train/export", "train/launch"}
    rooms = [path for package in ("jgt", "train") for path in sorted((ROOT / package).iterdir()) if (path / "__init__.py").exists()]
    names = {path.relative_to(ROOT).as_posix() for path in rooms}
    assert {name for name in names if not touched.tests_of([f"{name}/x.py"])} == without
