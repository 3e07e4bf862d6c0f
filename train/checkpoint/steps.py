"""The folder of a run's checkpoints: which steps are finished, which are set aside, which are removed. Needs neither JAX nor Orbax.

A process may be killed between any two lines of this file, and what is listed must still be whole. So a step is written below another
name (`12.saving`), gets its manifest last, and is then renamed to its number: a rename is atomic, so a folder named `12` was complete
once. Removal goes the other way round: a step is renamed into `trash` before its first file is removed. What a killed process leaves has
a name that is never listed, and the next start removes it. A power cut also takes back what is not on the disk yet. So everything below a
step, whoever wrote it, is written to disk before the step gets its name, and the name before an older step is removed.

Before a step is used, its files are compared with its manifest. A disk that cannot be read at all is an OSError of these functions, and no
verdict on a step.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ..files.disk import describe, is_damage, kind, patiently, sync, sync_above, sync_tree
from ..settings.sections import CHECKPOINTS as FOLDER
from . import manifest
from .bucket_steps import BucketSteps, SavedStep
from .contents import file_entries, file_problems
from .listing import Manifest
from .manifest import BrokenError
from .signature import Key

_SAVING = ".saving"
_TRASH = "trash"
_MAX_PROBLEMS = 5
# Ten digits at most, and no leading zero: one folder name for each step.
_STEP = re.compile(r"[1-9][0-9]{0,9}")
_URL = re.compile(r"(.+?)(?:/checkpoints(?:/manifests/0*([1-9][0-9]*)\.json)?)?/*")


class Steps:
    """The steps below a folder. The folder is created when the first step is written. key: signs and verifies the manifests."""

    def __init__(self, folder: Path, key: Key | None = None):
        self.folder = folder.absolute()
        self._key = key
        self._is_named = False

    def listed(self) -> list[int]:
        """The finished steps, the newest last. A link is not a step, because what it leads to belongs to someone else."""
        steps = [path for path in self._entries() if _STEP.fullmatch(path.name)]
        return sorted(int(path.name) for path in steps if kind(path) == stat.S_IFDIR)

    def newest(self) -> int:
        """The newest finished step; 0 if there is none, or if the disk cannot be read."""
        try:
            return max(self.listed(), default=0)
        except OSError:
            return 0

    def path(self, step: int) -> Path:
        """The folder of a finished step."""
        return self.folder / str(step)

    def saving(self, step: int) -> Path:
        """The folder in which a step is written."""
        return self.folder / f"{step}{_SAVING}"

    def saved_at(self, step: int) -> float:
        """The time at which a step was finished, in seconds since 1970; NaN if it has no manifest. Raises OSError."""
        try:
            return (self.path(step) / manifest.NAME).stat().st_mtime
        except FileNotFoundError:
            return float("nan")

    def open(self, step: int, part: tuple[int, int] = (0, 1)) -> SavedStep:
        """A step, after comparing its files with its manifest. Raises as `read` does."""
        return SavedStep(folder=self.path(step), manifest=self.read(step, part))

    def saved(self, step: int) -> SavedStep:
        """A step as its manifest describes it, for a reader that checks what it reads. Raises as `read` does."""
        return SavedStep(folder=self.path(step), manifest=manifest.read(self.path(step), self._key))

    def read(self, step: int, part: tuple[int, int] = (0, 1)) -> Manifest:
        """The manifest of a step, after comparing its files with it. part: as in `file_problems`.

        Raises BrokenError or UnsignedError if the step must not be used, and OSError if the disk cannot be read.
        """
        path = self.path(step)
        try:
            listing = manifest.read(path, self._key)
            if listing.step != step:
                raise BrokenError(f"its manifest is from step {listing.step}")
            if problems := list(file_problems(path, listing, part)):
                more = [f"and {len(problems) - _MAX_PROBLEMS} more problems"] if len(problems) > _MAX_PROBLEMS else []
                raise BrokenError("; ".join([*problems[:_MAX_PROBLEMS], *more]))
            return listing
        except (BrokenError, OSError) as error:
            if isinstance(error, OSError) and not is_damage(error):
                raise
            # A step whose whole folder is gone was not damaged: its disk is away.
            if kind(path) != stat.S_IFDIR:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
            raise (BrokenError(describe(error, path)) if isinstance(error, OSError) else error) from None

    def set_aside(self, step: int) -> Path:
        """Renames a damaged step to `STEP.broken`: it is not listed again, and a person can look at it. Returns the new path."""
        names = (self.folder / f"{step}.broken{n or ''}" for n in itertools.count())
        target = next(path for path in names if not (path.exists() or path.is_symlink()))
        self.path(step).rename(target)
        sync(self.folder)
        return target

    def finish(self, listing: Manifest) -> None:
        """Writes the manifest of a step whose files are written, and gives the step its name."""
        saving = self.saving(listing.step)
        if kind(self.path(listing.step)) == stat.S_IFDIR:
            # An earlier try has failed after the rename. What it wrote is whole, and of the same state.
            sync(self.folder)
            remove(saving)
            return
        # Orbax leaves some of its files to the system's cache. The manifest is on disk before the rename: after a power cut no step may be
        # listed without one.
        sync_tree(saving)
        manifest.write(saving, listing, self._key)
        saving.rename(self.path(listing.step))
        # A rename is an entry of the parent folder, and on disk only after the folder is. Until then `retire` must not run: a power cut
        # could undo the rename, and the older steps would be gone.
        sync(self.folder)
        if not self._is_named:
            # Once, because the folders above are new at most once.
            sync_above(self.folder)
            self._is_named = True

    def sign(self, step: int) -> None:
        """Signs a whole step that was saved without the key. Raises BrokenError if it is damaged."""
        path = self.path(step)
        listing = Steps(self.folder).read(step)
        manifest.write(path, replace(listing, files=file_entries(path, sha256=True)), self._key)

    def retire(self, keep: int, held: Collection[int] = ()) -> None:
        """Removes all but the newest `keep` steps, and those that are held."""
        for step in self.listed()[:-keep]:
            if step in held:
                continue
            trash = self.folder / _TRASH
            trash.mkdir(exist_ok=True)
            # An earlier removal of the same step may have been interrupted, and a rename needs an empty target.
            remove(trash / str(step))
            self.path(step).rename(trash / str(step))
            # Otherwise a power cut could leave a step listed whose first files are removed.
            sync(self.folder)
        remove(self.folder / _TRASH)

    def clear(self) -> None:
        """Removes what an interrupted save or removal left. Must not be called while a save is under way."""
        for path in self._entries():
            if _SAVING in path.name or path.name == _TRASH:
                remove(path)

    def _entries(self) -> list[Path]:
        if kind(self.folder) != stat.S_IFDIR:
            return []
        return patiently(lambda: list(self.folder.iterdir()), self.folder)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there. A link goes without what it leads to. Raises OSError."""
    # rmtree refuses links.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_steps(place: Path | str, key: Key | None = None) -> Steps | BucketSteps:
    """The steps below a path or a URL."""
    return BucketSteps(place) if isinstance(place, str) else Steps(place, key)


def find_steps(path: Path | str, key: Key | None = None) -> tuple[Steps | BucketSteps, int | None]:
    """The steps at a place that a person names: a run directory or a run's URL, its `checkpoints` folder, or one of the steps in it.

    Returns the number of the step too if the path names one. Raises OSError.
    """
    if isinstance(path, str):
        run, step = run_url(path)
        return BucketSteps(f"{run}/{FOLDER}"), step
    # A relative path may be `.`, which has no name, and a step is recognised by its name.
    path = path.absolute()
    # A step has a number for a name, but so may a run directory; only a step has a manifest.
    if path.name.isdecimal() and kind(path / manifest.NAME) is not None:
        return Steps(path.parent, key), int(path.name)
    return Steps(path / FOLDER if kind(path / FOLDER, follow=True) == stat.S_IFDIR else path, key), None


def steps_near(path: Path | str) -> str:
    """The end of a message about a place without a checkpoint: `. Its steps are 50, 100`, which are at the place or beside it."""
    run = path.absolute().parent if isinstance(path, Path) and path.name.isdecimal() else path
    listed = find_steps(run)[0].listed()
    return f". Its steps are {', '.join(map(str, sorted(listed)[-12:]))}" if listed else ""


def run_url(url: str) -> tuple[str, int | None]:
    """The URL of a run, by itself or by that of its checkpoints or of one of them, whose step it returns too."""
    match = _URL.fullmatch(url)
    assert match is not None
    return match[1], int(match[2]) if match[2] else None
