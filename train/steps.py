"""The folder of a run's checkpoints: which steps are whole, which are set aside, which go. Free of JAX and Orbax.

A step is written beside the others under another name, gets its manifest last, and then its own name: what has a step's name
was whole once. Before it is used its files are held against the manifest again.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from train import manifest
from train.manifest import BrokenError, Manifest

FOLDER = "checkpoints"
"""Where the steps are in a run directory."""
_SAVING = ".saving"
_TRASH = "trash"
_MAX_PROBLEMS = 5
_STEP = re.compile(r"[1-9][0-9]{0,9}")


class Steps:
    """The steps below a folder, which is made when the first one is finished."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def listed(self) -> list[int]:
        """The steps that were finished, the newest last; links and other names are none."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir() and not p.is_symlink())

    def path(self, step: int) -> Path:
        """Where a finished step is."""
        return self.folder / str(step)

    def saving(self, step: int) -> Path:
        """Where a step is written."""
        return self.folder / f"{step}{_SAVING}"

    def read(self, step: int, part: tuple[int, int] = (0, 1)) -> Manifest:
        """The manifest of a step whose files are as they were written; part as in `manifest.check`. Raises BrokenError."""
        found = manifest.read(self.path(step))
        if found.step != step:
            raise BrokenError(f"its manifest is that of step {found.step}")
        if problems := list(manifest.check(self.path(step), found, part)):
            more = [f"and {len(problems) - _MAX_PROBLEMS} more problems"] if len(problems) > _MAX_PROBLEMS else []
            raise BrokenError("; ".join([*problems[:_MAX_PROBLEMS], *more]))
        return found

    def set_aside(self, step: int) -> Path:
        """Renames a step that may not be used, so that it is never listed again and can be looked at."""
        taken = (self.folder / f"{step}.broken{n or ''}" for n in itertools.count())
        target = next(path for path in taken if not (path.exists() or path.is_symlink()))
        self.path(step).rename(target)
        manifest.sync_folder(self.folder)
        return target

    def finish(self, found: Manifest) -> None:
        """Gives a step that was written its manifest and its name."""
        saving = self.saving(found.step)
        manifest.write(saving, found)
        saving.rename(self.path(found.step))
        manifest.sync_folder(self.folder)

    def retire(self, keep: int) -> None:
        """Removes all but the newest `keep` steps: renamed first, so that none is listed half."""
        for step in self.listed()[:-keep]:
            trash = self.folder / _TRASH
            trash.mkdir(exist_ok=True)
            _remove(trash / str(step))
            self.path(step).rename(trash / str(step))
        _remove(self.folder / _TRASH)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left."""
        for path in self._leftovers():
            _remove(path)

    def _leftovers(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (p for p in self.folder.iterdir() if _SAVING in p.name or p.name == _TRASH)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
