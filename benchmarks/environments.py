"""Virtual environments for the programs that jgt is compared with: made once, with pinned versions, in a cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import FailedError

_DONE = "requirements.txt"


def default_folder() -> Path:
    """In the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgt-peers"


def python_with(requirements: Sequence[str], folder: Path, name: str) -> Path:
    """The interpreter of an environment in `folder` that has just these requirements and what they need. Raises FailedError.

    It is made with this interpreter, unless it is there already; one that was not finished, or has other requirements, is made anew.
    """
    place = folder / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    python, done, wanted = place / "bin" / "python", place / _DONE, "\n".join(requirements) + "\n"
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"Makes {place}: {' '.join(requirements)}", file=sys.stderr)
    venv.create(place, clear=True, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    if subprocess.run(install, stdout=sys.stderr, check=False).returncode:
        raise FailedError(f"{' '.join(install)}: failed")
    done.write_text(wanted)
    return python
