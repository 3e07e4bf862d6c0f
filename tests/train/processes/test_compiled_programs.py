"""Stored programs: whatever happens to the files, none is used that is not the one that was stored under its key."""

import io
import os
import random
import signal
import stat
import subprocess
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from train.files.sealed import write_sealed
from train.processes import compiled
from train.processes.compiled import ENDING, TRIAL, Programs, open_programs, use_programs

# A trial is open as long as its process lives, unless a step is finished.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

HARMS = ("flip", "cut", "swap", "empty")


class Zlib:
    compress, decompress = staticmethod(zlib.compress), staticmethod(zlib.decompress)


class Unchecked:
    """Like zstd's frames without a checksum, it notices nothing."""

    compress = decompress = staticmethod(bytes)


def codec(name):
    if name != "zstandard":
        return {"zlib": Zlib, "unchecked": Unchecked}[name]
    zstandard = pytest.importorskip("zstandard")

    class Zstandard:
        compress, decompress = staticmethod(zstandard.ZstdCompressor().compress), staticmethod(zstandard.ZstdDecompressor().decompress)

    return Zstandard


@contextmanager
def jax_stores_in(folder):
    """JAX uses the programs in a folder."""
    before = jax.config.jax_compilation_cache_dir
    assert use_programs(open_programs(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module", params=["zlib", "zstandard", "unchecked"])
def stored(request, tmp_path_factory):
    """Programs that JAX has stored, by key."""
    chosen = codec(request.param)
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch, jax_stores_in(folder):
        patch.setattr(compilation_cache, "zstd", chosen)
        for fn in (lambda x: jnp.sin(x), lambda x: jnp.cumsum(x @ x), lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y @ x + i, x)):
            jax.jit(fn)(jnp.ones((8, 8)))
    keys = [path.name.removesuffix(ENDING) for path in folder.iterdir() if path.name.endswith(ENDING)]
    assert len(keys) >= 3
    found = {key: Programs(folder).get(key) for key in keys}
    assert all(chosen.decompress(program) for program in found.values())
    return found


def harmed(kind, sealed, key, chance):
    """The bytes of a file after an accident."""
    data = bytearray(sealed[key])
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[chance.randrange(1, len(data)) :]
    elif kind == "swap":
        data = sealed[chance.choice([other for other in sealed if other != key])]
    else:
        data = b""
    return bytes(data)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_harmed_program_is_used(stored, count, tmp_path, capsys):
    programs, chance = open_programs(tmp_path), random.Random(count)
    for key, program in stored.items():
        programs.put(key, program)
    sealed = {key: (tmp_path / f"{key}{ENDING}").read_bytes() for key in stored}
    unnoticed, missed = [], []
    for i in range(count):
        # Flips are the most of them: the other harms have fewer places.
        kind = "flip" if i % 2 else chance.choice(HARMS)
        key = chance.choice(list(stored))
        path = tmp_path / f"{key}{ENDING}"
        path.write_bytes(harmed(kind, sealed, key, chance))
        if programs.get(key) is not None or path.exists():
            unnoticed.append((i, kind, key))
        path.write_bytes(sealed[key])
        if programs.get(key) != stored[key]:
            missed.append((i, kind, key))
    assert (unnoticed, missed) == ([], [])
    assert "It was removed and is compiled again" in capsys.readouterr().err


def make_pipe(path):
    os.mkfifo(path)


def make_folder(path):
    (path / "inside").mkdir(parents=True)


def make_link(path):
    path.symlink_to(path.parent / "elsewhere")


def make_socket(path):
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_link, make_socket])
def test_what_is_not_a_file_is_removed_and_what_a_link_leads_to_stays(make, tmp_path, capsys):
    programs = open_programs(tmp_path)
    write_sealed(tmp_path / "elsewhere", b"another")
    make(tmp_path / f"jit_f{ENDING}")
    assert programs.get("jit_f") is None
    path = tmp_path / f"jit_f{ENDING}"
    assert capsys.readouterr().err == f"jgt: the compiled program {path} is not a file. It was removed and is compiled again\n"
    programs.put("jit_f", b"program")
    assert programs.get("jit_f") == b"program"
    assert (tmp_path / "elsewhere").exists()


def test_a_program_that_cannot_be_read_now_stays(tmp_path, capsys, monkeypatch):
    programs = open_programs(tmp_path)
    programs.put("jit_f", b"program")

    def fail(path, key):
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "read_sealed", fail)
        assert programs.get("jit_f") is None
        assert programs.get("jit_f") is None
    path = tmp_path / f"jit_f{ENDING}"
    assert capsys.readouterr().err == f"jgt: the compiled program {path} cannot be read: Input/output error. It is compiled again\n"
    assert programs.get("jit_f") == b"program"


def test_a_folder_that_is_read_only_can_be_used(tmp_path, capsys):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        programs = open_programs(folder)
        programs.put("jit_f", b"program")
        (folder / f"jit_g{ENDING}").write_bytes(b"damaged")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        programs = open_programs(folder)
        assert programs.get("jit_f") == b"program"
        for _ in range(2):
            assert programs.get("jit_g") is None
            programs.put("jit_g", b"program")
        assert capsys.readouterr().err.splitlines() == [
            f"jgt: the compiled program {folder}/jit_g{ENDING} is damaged: its checksum differs. "
            "It cannot be removed (Read-only file system), and is compiled at each start",
            f"jgt: compiled programs cannot be stored in {folder}: Read-only file system. Those that are in it can still be used",
        ]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_no_unfinished_file(tmp_path, capsys, monkeypatch):
    programs = open_programs(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    programs.put("jit_f", b"program")
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SHARED = f"""
import random, sys
from pathlib import Path
from train.processes.compiled import Programs
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
programs, chance = Programs(folder), random.Random(seed)
for i in range(400):
    key = f"jit_{{chance.randrange(3)}}"
    if seed == 0:
        (folder / f"{{key}}{ENDING}").write_bytes(b"jgt sealed 1" + bytes(chance.randrange(99)))
    elif chance.random() < 0.5:
        programs.put(key, key.encode() * chance.randrange(1, 50_000))
    elif (found := programs.get(key)) is not None:
        assert found and found == key.encode() * (len(found) // len(key)), (key, found[:20])
programs.end_trial()
"""


def test_processes_that_share_a_folder_meet_whole_programs(tmp_path, root):
    started = [
        subprocess.Popen([sys.executable, "-c", SHARED, str(tmp_path), str(seed)], cwd=root, stderr=subprocess.DEVNULL) for seed in range(4)
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0, 0]
    assert all(path.name.endswith(ENDING) for path in tmp_path.iterdir())


# -- trial -------------------------------------------------------------------------------------------------------

DYING = """
import os, sys
from pathlib import Path
from train.processes.compiled import open_programs
programs = open_programs(Path(sys.argv[1]))
programs.get("jit_f-1"), programs.get("jit_g-2")
exec(sys.argv[2])
"""


def die(folder, root, last="os.kill(os.getpid(), 9)"):
    return subprocess.run([sys.executable, "-c", DYING, str(folder), last], cwd=root, timeout=60).returncode


@pytest.fixture
def three(tmp_path):
    programs = open_programs(tmp_path)
    for key in ("jit_f-1", "jit_g-2", "jit_h-3"):
        programs.put(key, key.encode())
    return tmp_path


def usable(programs):
    found = [key for key in ("jit_f-1", "jit_g-2", "jit_h-3") if programs.get(key)]
    programs.end_trial()
    return found


def test_programs_that_a_dead_process_had_loaded_are_removed(three, root, capsys):
    assert die(three, root) == -signal.SIGKILL
    assert len(list(three.glob(f"*{TRIAL}"))) == 1
    assert usable(open_programs(three)) == ["jit_h-3"]
    assert capsys.readouterr().err == (
        f"jgt: a start died before it finished a step with compiled programs from {three}. They are compiled again: jit_f, jit_g\n"
    )
    assert sorted(path.name for path in three.iterdir()) == [f"jit_h-3{ENDING}"]
    assert usable(open_programs(three)) == ["jit_h-3"]
    assert capsys.readouterr().err == ""


def test_programs_of_a_process_that_lives_or_has_finished_a_step_stay(three, root, capsys):
    alive = open_programs(three)
    assert alive.get("jit_f-1")
    assert usable(open_programs(three)) == ["jit_f-1", "jit_g-2", "jit_h-3"]
    alive.end_trial()
    assert die(three, root, "programs.end_trial(); os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert usable(open_programs(three)) == ["jit_f-1", "jit_g-2", "jit_h-3"]
    assert capsys.readouterr().err == ""


def test_a_program_loaded_after_a_step_is_on_trial_again(three, root):
    assert die(three, root, "programs.end_trial(); programs.get('jit_h-3'); os.kill(os.getpid(), 9)") == -signal.SIGKILL
    assert usable(open_programs(three)) == ["jit_f-1", "jit_g-2"]


def test_a_trial_leads_nowhere_else(three, tmp_path, capsys):
    outside = tmp_path.parent / f"victim{ENDING}"
    outside.touch()
    (three / "letters.txt").touch()
    (three / f"letters{TRIAL}").write_text(f"letters.txt\njit_none-1\n../victim\n{outside.with_suffix('')}\n")
    (three / f"bytes{TRIAL}").write_bytes(b"jit_f-1\xff\0")
    os.mkfifo(three / f"pipe{TRIAL}")
    (tmp_path.parent / "names").write_text("jit_g-2")
    (three / f"link{TRIAL}").symlink_to(tmp_path.parent / "names")
    (three / f"folder{TRIAL}").mkdir()
    programs = open_programs(three)
    assert all(programs.get(key) for key in ("jit_f-1", "jit_g-2", "jit_h-3"))
    assert outside.exists() and (three / "letters.txt").exists()
    assert capsys.readouterr().err == ""


def test_without_locks_there_is_no_trial(three, monkeypatch):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("train.files.locks.fcntl.flock", fail)
    programs = open_programs(three)
    assert programs.get("jit_f-1")
    assert usable(open_programs(three)) == ["jit_f-1", "jit_g-2", "jit_h-3"]
    programs.end_trial()
    assert {path.name for path in three.iterdir()} == {f"{key}{ENDING}" for key in ("jit_f-1", "jit_g-2", "jit_h-3")}


# -- the folder --------------------------------------------------------------------------------------------------


def test_a_folder_that_has_grown_too_large_loses_the_oldest(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_LARGEST", 25)
    for age, name in enumerate(["new-cache", f"old{ENDING}", "oldest-cache", "first-atime"]):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "letters.txt").write_bytes(bytes(100))
    open_programs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters.txt", "new-cache", f"old{ENDING}"]


def test_what_killed_writers_left_is_removed_like_an_old_program(monkeypatch, tmp_path):
    def die(path, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "_LARGEST", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            open_programs(tmp_path).put("jit_f", b"program")
    assert len(list(tmp_path.iterdir())) == 1
    open_programs(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_messages_survive_a_closed_stderr(tmp_path, monkeypatch):
    programs = open_programs(tmp_path)
    (tmp_path / f"jit_f{ENDING}").touch()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert programs.get("jit_f") is None
