"""The run files and rules that come with jgt, by name: `jgt:quickstart`, `jgt:rules/fsdp`.

The folder configs/ of the repository is also inside the wheel, as jgt/configs, so that an installation without a checkout has something to
run. A name with the prefix means the same file in both, wherever the command runs. Files that a shipped file refers to are relative to it,
as for any other file.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "jgt:"
_PACKAGE = Path(__file__).parents[1]


def shipped_folder() -> Path:
    """The folder of the shipped files: inside an installed package, or beside the package in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def locate(path: str | Path, folder: str = "") -> Path:
    """The path, where `jgt:NAME` stands for the shipped file of that name. Whether there is such a file is found out by reading it.

    folder: where in the shipped folder a name is looked up, such as `rules`.
    """
    text = str(path)
    return shipped_folder() / folder / f"{text.removeprefix(_PREFIX)}.yaml" if text.startswith(_PREFIX) else Path(path)
