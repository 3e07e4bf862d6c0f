"""A disk that fails, and one that loses its power: `disk.c` around the calls of a process, and what a cut leaves of its files."""

import os
import random
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

UNDER = "/checkpoints"


def build(folder):
    """The path of disk.c as a library. Skips the test where it cannot be built."""
    library, source = folder / "disk.so", Path(__file__).with_name("disk.c")
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True, capture_output=True)
    return library


def variables(**values):
    """The environment of a process with such a disk. log="x" sets $DISK_LOG."""
    return {"DISK_UNDER": UNDER} | {f"DISK_{name.upper()}": str(value) for name, value in values.items()}


@dataclass
class _Folder:
    """A folder as processes see it, and as it was when it last reached the disk. Entries: name → inode (an int) or _Folder."""

    entries: dict = field(default_factory=dict)
    on_disk: dict = field(default_factory=dict)


class Power:
    """What is on the disk after the first lines of a log of `disk.c`.

    The harshest disk: a file has the content that it had when it was last synced, otherwise none; a folder has the entries that it had
    when it was last synced. With a random.Random, a file or folder that was changed later may have reached the disk too.
    """

    def __init__(self, top, lines, store):
        self._top, self._store = str(top), store
        self._root, self._synced = _Folder(), {}
        for line in lines:
            verb, _, rest = line.partition(" ")
            getattr(self, f"_{verb}")(rest)

    def rebuild(self, target, chance=None):
        """Writes what is on the disk into a new folder."""
        self._write(self._root, Path(target), chance)

    def _write(self, folder, target, chance):
        target.mkdir()
        entries = folder.entries if chance and chance.random() < 0.5 else folder.on_disk
        for name, entry in entries.items():
            if isinstance(entry, _Folder):
                self._write(entry, target / name, chance)
                continue
            content = (self._store / str(entry)).read_bytes()
            size = self._synced.get(entry, 0)
            (target / name).write_bytes(content[: chance.randint(size, len(content)) if chance and size < len(content) else size])

    def _place(self, path):
        """The folder of a path, and its name."""
        parts = path.removeprefix(self._top).strip("/").split("/")
        folder = self._root
        for part in parts[:-1]:
            folder = folder.entries[part]
        return folder, parts[-1]

    def _create(self, rest):
        inode, path = rest.split(" ", 1)
        folder, name = self._place(path)
        folder.entries[name] = int(inode)

    def _mkdir(self, path):
        if path != self._top:
            folder, name = self._place(path)
            folder.entries[name] = _Folder()

    def _sync(self, rest):
        inode, size, _ = rest.split(" ", 2)
        self._synced[int(inode)] = int(size)

    def _syncdir(self, path):
        folder = self._root
        if path.rstrip("/") != self._top:
            parent, name = self._place(path)
            folder = parent.entries[name]
        folder.on_disk = dict(folder.entries)

    def _rename(self, rest):
        old, new = rest.split("\t")
        folder, name = self._place(old)
        entry = folder.entries.pop(name)
        folder, name = self._place(new)
        folder.entries[name] = entry

    def _remove(self, path):
        folder, name = self._place(path)
        del folder.entries[name]


def cuts(lines, count, seed):
    """Random numbers of lines after which the power is cut."""
    return sorted(random.Random(seed).sample(range(1, len(lines) + 1), min(count, len(lines))))


def read_log(path):
    """The lines of a log of `disk.c`."""
    return os.fsdecode(path.read_bytes()).splitlines()
