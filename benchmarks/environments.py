"""Virtual environments for the programs that jgt is compared with. Each is made once, with pinned versions, in a cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import FailedError

_DONE = "requirements.txt"
_VERSION = "import sys; print('{}.{}'.format(*sys.version_info))"


def default_folder() -> Path:
    """The folder of the environments, inside the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgt-peers"


def python_with(requirements: Sequence[str], folder: Path, name: str, python: str = sys.executable) -> Path:
    """The interpreter of an environment in `folder` that contains exactly these requirements and their dependencies.

    The environment is made with `python` if it does not exist, is incomplete or has other requirements. Raises FailedError.
    """
    version = subprocess.run([python, "-c", _VERSION], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    place = folder / f"{name}-py{version}"
    made, done, wanted = place / "bin" / "python", place / _DONE, "\n".join(requirements) + "\n"
    if done.exists() and done.read_text() == wanted:
        return made
    print(f"Making {place}", file=sys.stderr)
    _run([python, "-m", "venv", "--clear", str(place)])
    asked = place / "asked.txt"
    asked.write_text(wanted)
    _run([str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(asked)])
    asked.rename(done)
    return made


def _run(command: Sequence[str]) -> None:
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise FailedError(f"{' '.join(command)}: failed")
