"""The folder of a run's checkpoints: which steps are finished, which are set aside, which are removed. Needs neither JAX nor Orbax.

A process may be killed between any two lines of this file, and what is listed must still be whole. So a step is written below another
name (`12.saving`), gets its manifest last, and is then renamed to its number: a rename is atomic, so a folder named `12` was complete
once. Removal goes the other way round: a step is renamed into `trash` before its first file is removed. What a killed process leaves has
a name that is never listed, and the next start removes it.

Renaming says nothing about bits that change on the disk later. Before a step is used, its files are compared with its manifest.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from train.checkpoint import manifest
from train.checkpoint.manifest import BrokenError, Manifest

FOLDER = "checkpoints"
"""The folder of the steps in a run directory."""
_SAVING = ".saving"
_TRASH = "trash"
_MAX_PROBLEMS = 5
# At most ten digits, and no leading zero: one folder name for each step.
_STEP = re.compile(r"[1-9][0-9]{0,9}")


class Steps:
    """The steps below a folder. The folder is created when the first step is written."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def listed(self) -> list[int]:
        """The finished steps, the newest last. A link is not a step, because what it leads to belongs to someone else."""
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if _STEP.fullmatch(p.name) and p.is_dir() and not p.is_symlink())

    def path(self, step: int) -> Path:
        """The folder of a finished step."""
        return self.folder / str(step)

    def saving(self, step: int) -> Path:
        """The folder in which a step is written."""
        return self.folder / f"{step}{_SAVING}"

    def read(self, step: int, part: tuple[int, int] = (0, 1)) -> Manifest:
        """The manifest of a step, after comparing its files with it. part: as in `manifest.file_problems`. Raises BrokenError."""
        listing = manifest.read(self.path(step))
        if listing.step != step:
            raise BrokenError(f"its manifest is from step {listing.step}")
        if problems := list(manifest.file_problems(self.path(step), listing, part)):
            more = [f"and {len(problems) - _MAX_PROBLEMS} more problems"] if len(problems) > _MAX_PROBLEMS else []
            raise BrokenError("; ".join([*problems[:_MAX_PROBLEMS], *more]))
        return listing

    def set_aside(self, step: int) -> Path:
        """Renames a damaged step to `STEP.broken`: it is not listed again, and a person can look at it. Returns the new path."""
        names = (self.folder / f"{step}.broken{n or ''}" for n in itertools.count())
        target = next(path for path in names if not (path.exists() or path.is_symlink()))
        self.path(step).rename(target)
        manifest.sync_folder(self.folder)
        return target

    def finish(self, listing: Manifest) -> None:
        """Writes the manifest of a step whose files are written, and gives the step its name."""
        saving = self.saving(listing.step)
        # The manifest is on disk before the rename: after a power failure no step may be listed without one.
        manifest.write(saving, listing)
        saving.rename(self.path(listing.step))
        # A rename is an entry of the parent folder, and on disk only after the folder is. Until then `retire` must not run: a power failure
        # could undo the rename, and the older steps would be gone.
        manifest.sync_folder(self.folder)

    def retire(self, keep: int) -> None:
        """Removes all but the newest `keep` steps."""
        for step in self.listed()[:-keep]:
            trash = self.folder / _TRASH
            trash.mkdir(exist_ok=True)
            # An earlier removal of the same step may have been interrupted, and a rename needs an empty target.
            _remove(trash / str(step))
            self.path(step).rename(trash / str(step))
        _remove(self.folder / _TRASH)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left. Must not be called while a save is under way."""
        for path in self._leftovers():
            _remove(path)

    def _leftovers(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (p for p in self.folder.iterdir() if _SAVING in p.name or p.name == _TRASH)


def _remove(path: Path) -> None:
    # rmtree refuses links. A link goes without what it leads to.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
