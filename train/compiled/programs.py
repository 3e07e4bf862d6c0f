"""The folder of compiled programs: each is checked before it is used, and none of its faults ends a run.

A restart should not compile again what an earlier start has compiled. But a program that comes from a disk is executed as it is: with one
wrong bit it may compute other numbers without a word. So each is stored with a seal over its key and its content (`sealed.py`), and with
a list of the programs that have not run yet (`trial.py`). Whatever is damaged, incomplete, exchanged with another, or is not a file at
all is reported once on stderr, removed, and compiled again. A program that cannot be read now is compiled again too, but stays: a disk
that fails for a moment is not damage.

Many processes share a folder: those of a run, and other runs. They take no locks. Names appear and disappear at any moment, so an absent
file is never an error. The folder may be read-only. It may grow to 10 GiB; then the oldest programs go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import time
from pathlib import Path

from ..sink import say
from .sealed import UNFINISHED, DamagedError, read_sealed, remove_any, write_sealed
from .trial import Trial, suspects

ENDING = ".sealed-cache"
"""The end of the names of stored programs. JAX's own cache, which may be in the same folder, uses `-cache` and `-atime`."""
_COUNTED = ("-cache", "-atime")
_LARGEST = 10 * 2**30
_ABANDONED_SECONDS = 3600
"""After this long without a change, an unfinished file has no writer."""
_MOST_NAMES = 5


class Programs:
    """Compiled programs by key, in a folder. Its methods never raise OSError."""

    def __init__(self, folder: Path):
        self.folder, self.trial = folder, Trial(folder)
        self._refused: set[str] = set()
        self._reported: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """The program of a key, which is then on trial; None if there is none that can be used."""
        path = self.folder / f"{key}{ENDING}"
        if path.name in self._refused:
            return None
        try:
            program = read_sealed(path)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self._report(f"the compiled program {path} {error}. {self._remove(path)}")
            return None
        except OSError as error:
            self._report(f"the compiled program {path} cannot be read: {error.strerror or error}. It is compiled again")
            return None
        self.trial.add(path.name)
        return program

    def put(self, key: str, program: bytes) -> None:
        """Stores the program of a key, in place of an earlier one."""
        try:
            write_sealed(self.folder / f"{key}{ENDING}", program)
        except OSError as error:
            why = error.strerror or str(error)
            self._report(f"compiled programs cannot be stored in {self.folder}: {why}. Those that are in it can still be used")

    def remove_suspects(self) -> None:
        """Removes the programs that an earlier start had loaded when it died."""
        with suspects(self.folder) as names:
            paths = [self.folder / name for name in names if _is_program(name) and os.path.lexists(self.folder / name)]
            for path in paths:
                self._remove(path)
        if paths:
            shown = sorted({path.name.rpartition("-")[0].rpartition("-")[0] for path in paths})
            more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
            self._report(
                f"a start died before it finished a step with compiled programs from {self.folder}. They are compiled again: "
                f"{', '.join(shown[:_MOST_NAMES])}{more}"
            )

    def _remove(self, path: Path) -> str:
        """Removes a program, or at least does not use it. Returns a sentence about it."""
        try:
            remove_any(path)
        except OSError as error:
            self._refused.add(path.name)
            return f"It cannot be removed ({error.strerror or error}), and is compiled at each start"
        return "It was removed and is compiled again"

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            say(text)


def open_programs(folder: Path) -> Programs:
    """The programs in a folder, which is made if it is absent, without those that should not be used. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(folder)
    programs.remove_suspects()
    _prune(folder)
    return programs


def default_folder() -> Path:
    """A folder in the user's cache, one for each kind of CPU: a program compiled for one kind may use instructions that another lacks.

    Raises RuntimeError for a user without a home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return base / "jgt" / "compiled" / f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _is_program(name: str) -> bool:
    # Lists of suspects may be damaged too, and must not lead elsewhere.
    return name.endswith(ENDING) and name.isprintable() and "/" not in name


def _prune(folder: Path) -> None:
    """Removes abandoned files, and the oldest programs of a folder that has grown too large. The rest stays: it may be the user's."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        if path.name.endswith((*_COUNTED, UNFINISHED)):
            # Another start may have removed it.
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    for changed, size, path in sorted(files):
        abandoned = path.name.endswith(UNFINISHED) and changed < time.time() - _ABANDONED_SECONDS
        if abandoned or (total > _LARGEST and not path.name.endswith(UNFINISHED)):
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
