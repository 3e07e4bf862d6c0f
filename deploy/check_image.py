"""Runs the lines of deploy/Dockerfile in a fresh root that debootstrap makes, where there is no Docker. Needs root and debootstrap.

    python deploy/check_image.py                                        # everything, CUDA's wheels included: about 8 GB
    python deploy/check_image.py --arg EXTRAS=tokenizers,chat           # where the disk is too small for them
    python deploy/check_image.py --bind /etc/pip.conf --bind /srv/wheels # with this machine's own package index

It stops at the first line that fails, with its exit code, and runs the last line, CMD, too.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTRUCTIONS = ("FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "CMD")


def lines_of(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile with what follows them. Raises ValueError for one that is not known here."""
    for line in re.sub(r"\\\n", " ", dockerfile.read_text()).splitlines():
        name, _, rest = line.partition(" ")
        if line and not line.startswith("#"):
            if name not in INSTRUCTIONS:
                raise ValueError(f"{dockerfile}: {name} is not known here. Known: {', '.join(INSTRUCTIONS)}")
            yield name, rest.strip()


class Image:
    """A root in which lines are run. given: values of ARG in the place of the file's."""

    def __init__(self, root: Path, given: dict[str, str], binds: list[str]):
        self.root, self.given, self.binds = root, given, binds
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **given}
        self.user, self.folder = "root", "/"

    def run(self, name: str, rest: str) -> None:
        """Runs a line. Raises CalledProcessError."""
        print(f"--- {name} {rest}", flush=True)
        getattr(self, f"_{name.lower()}")(rest)

    def _from(self, rest: str) -> None:
        distribution, _, tag = rest.partition(":")
        assert distribution == "debian", rest
        subprocess.run(
            ["debootstrap", "--variant=minbase", tag.removesuffix("-slim"), str(self.root)], check=True, stdout=subprocess.DEVNULL
        )
        for path in ("/proc", "/dev", "/sys", "/etc/resolv.conf", *self.binds):
            self._bind(Path(path))

    def _bind(self, path: Path) -> None:
        inside = self.root / path.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.mkdir(exist_ok=True) if path.is_dir() else inside.touch()
        subprocess.run(["mount", "--bind", str(path), str(inside)], check=True)
        if str(path) in self.binds:
            # What is this machine's own stays as it is, whatever a package's script does.
            subprocess.run(["mount", "-o", "remount,bind,ro", str(inside)], check=True)

    def _arg(self, rest: str) -> None:
        key, _, value = rest.partition("=")
        self.variables[key] = self.given.get(key, value)

    def _env(self, rest: str) -> None:
        key, _, value = rest.partition("=")
        self.variables[key] = value

    def _copy(self, rest: str) -> None:
        *names, place = shlex.split(rest)
        target = self.root / place.lstrip("/")
        (target if place.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
        for name in names:
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target, ignore=skip) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, target)

    def _user(self, rest: str) -> None:
        self.user, self.variables["HOME"] = rest, f"/home/{rest}"

    def _workdir(self, rest: str) -> None:
        self.folder = rest

    def _run(self, rest: str) -> None:
        variables = [f"{key}={value}" for key, value in self.variables.items()]
        command = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "-i", *variables]
        subprocess.run([*command, "sh", "-c", f"cd {self.folder} && {rest}"], check=True)

    def _cmd(self, rest: str) -> None:
        self._run(shlex.join(json.loads(rest)))


def main() -> int:
    """The exit code of the first line that failed; 0 if all are well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="a value of ARG, or a variable such as PIP_INDEX_URL"
    )
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="a path of this machine that is there, too, read-only")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="jgt-image-"))
    # Other users of the image have to enter it.
    root.chmod(0o755)
    image = Image(root, dict(pair.split("=", 1) for pair in arguments.arg), arguments.bind)
    try:
        for line in lines_of(ROOT / "deploy" / "Dockerfile"):
            image.run(*line)
    except subprocess.CalledProcessError as error:
        print(f"--- failed with exit code {error.returncode}", file=sys.stderr)
        return error.returncode
    finally:
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in [path for path in reversed(mounted) if path.startswith(f"{root}/")]:
            subprocess.run(["umount", "--lazy", path], check=False)
        if not any(line.split()[1].startswith(f"{root}/") for line in Path("/proc/mounts").read_text().splitlines()):
            shutil.rmtree(root)
    print("--- all lines are well" + (f", with other values of {', '.join(sorted(image.given))}" if image.given else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
