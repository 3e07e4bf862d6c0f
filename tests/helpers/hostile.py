"""Hostile input for tests: tables of cases, odd files, and checks on what the code under test does.

Code that reads a stranger's input promises four things: it starts no program, it changes nothing outside of its folder, it ends
within seconds, and it reports each problem in one printable line. `watched` checks the first three and `assert_lines` the fourth;
`refused` checks all of them for a command, `read_or_refused` for a loader.
"""

import contextlib
import gzip
import io
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jgt.document import InputError
from train.__main__ import main
from train.checkpoint.manifest import BrokenError
from train.data.config import DataConfig
from train.data.opening import open_data

SECONDS = 5
_HANGS = 60
"""The elapsed seconds after which a call hangs: a busy machine runs at a fraction of its speed."""
FOLDER = Path(__file__).parent.parent / "hostile"
VALID = FOLDER / "valid"

# -- tables of cases ---------------------------------------------------------------------------------------------


def table(name):
    """The cases in tests/hostile/cases/NAME.yaml, by name."""
    return yaml.safe_load((FOLDER / "cases" / f"{name}.yaml").read_text())


def names(cases):
    """The names of the cases as parameters of a test. A case with `slow: true` is marked."""
    return [pytest.param(name, marks=pytest.mark.slow if "slow" in case else ()) for name, case in cases.items()]


def content(case):
    """The bytes of a case, which is a mapping with `text` or with `bytes` (each character is a byte), or the text alone.

    A text is a string, or a list of strings and of repetitions `{repeat: TEXT, times: N, between: TEXT}`, where $i in TEXT is the
    number of the repetition. `encoding` (by default UTF-8) and `compress: gzip` are applied to the text.
    """
    if not isinstance(case, dict):
        case = {"text": case}
    if isinstance(case.get("bytes"), bytes):
        return case["bytes"]
    text = case["bytes"] if "bytes" in case else case["text"]
    joined = text if isinstance(text, str) else "".join(map(_piece, text))
    encoded = joined.encode("latin-1" if "bytes" in case else case.get("encoding", "utf-8"))
    return gzip.compress(encoded) if "compress" in case else encoded


def _piece(piece):
    if isinstance(piece, str):
        return piece
    text, times, between = piece["repeat"], piece["times"], piece.get("between", "")
    if "$i" in text:
        return between.join(text.replace("$i", str(i)) for i in range(times))
    return (text + between) * (times - 1) + text


def argument(case):
    """A case as an argument of a command line, as Python receives the bytes."""
    return os.fsdecode(content(case))


def diagonal(rows, columns, step):
    """All pairs of a row and a column, as parameters of a test.

    Every `step`-th diagonal of the grid always runs, so that each row and each column is covered. The other pairs are slow tests.
    """
    return [
        pytest.param(row, column, marks=() if (i + j) % step == 0 else pytest.mark.slow)
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns))
    ]


# -- commands and loaders ----------------------------------------------------------------------------------------


def command(*argv):
    """Runs jgt with these arguments. Returns exit code, stdout and the lines of stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    return code, out.getvalue(), err.getvalue().splitlines()


def refused(folder, *argv):
    """Runs a command that must refuse its input. Returns the problems that it reports."""
    with watched(folder):
        code, out, lines = command(*argv)
    assert (code, out) == (2, "")
    assert_lines(lines)
    return lines


def read_or_refused(folder, call, *arguments):
    """Calls a loader, which must return or raise an InputError. Returns None for an error."""
    with watched(folder):
        try:
            return call(*arguments)
        except InputError as error:
            problems = error.problems
    assert_lines(problems)
    return None


def opened(folder, vocab=256, **keys):
    """The data of a config with these keys."""
    return open_data(DataConfig(**{"eval_tokens": 0, **keys}), seq=4, vocab=vocab, seed=0, cache_dir=folder / "cache")


def read_step(steps, number=7):
    """Reads a step of a checkpoint. Returns "" if it is whole, or the reason why it is broken, which must be one line."""
    with watched(steps.folder):
        try:
            steps.read(number)
        except BrokenError as error:
            reason = str(error)
        else:
            return ""
    assert_lines([reason])
    return reason


# -- odd files ---------------------------------------------------------------------------------------------------


class Trap:
    """An object whose pickle makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


def make_socket(path):
    # A socket's path may have a hundred characters only.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)


PLACES = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")),
    "nothing": lambda path: None,
}


def npy(header, payload=b"", version=1, length=None):
    """An .npy file with any header text."""
    text = header.encode("latin1", "replace")
    size = len(text) if length is None else length
    packed = struct.pack("<H", size % 2**16) if version == 1 else struct.pack("<I", size % 2**32)
    return b"\x93NUMPY" + bytes([version, 0]) + packed + text + payload


def npy_header(descr="'<i4'", order="False", shape="(20,)", more=""):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n"


def saved(array, **options):
    """An .npy file as numpy writes it."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


# -- a watch -----------------------------------------------------------------------------------------------------

_RUNS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watches = []


def _on_event(event, arguments):
    if not _watches:
        return
    # The process in which chat templates run is jgt's own.
    if event in _RUNS and not (event == "subprocess.Popen" and str(arguments[1][2:3]).endswith("train/data/chat/sandbox.py']")):
        _watches[-1].seen.append(f"{event} {arguments}")
    elif event == "open":
        path, mode, flags = arguments
        if (set(mode or "") & set("wax+")) or (mode is None and flags & _WRITING):
            _watches[-1].changed(event, path)
        elif not isinstance(path, int):
            _watches[-1].opened.add(os.fsdecode(path))
    elif event in _CHANGES:
        _watches[-1].changed(event, arguments[1] if event in ("os.symlink", "os.link") else arguments[0])
        if event == "os.rename":
            _watches[-1].changed(event, arguments[1])


# A hook stays for the life of the process; without a watch it does nothing.
sys.addaudithook(_on_event)


class _Watch:
    def __init__(self, folder):
        self.folder, self.seen, self.opened = os.path.realpath(folder), [], set()

    def changed(self, event, path):
        if isinstance(path, int) or path == os.devnull or Path(os.fsdecode(path)).suffix == ".pyc" or "__pycache__" in str(path):
            return
        # JAX keeps what it compiles.
        if (cache := jax.config.jax_compilation_cache_dir) and os.fsdecode(path).startswith(cache):
            return
        if not f"{os.path.realpath(path)}/".startswith(f"{self.folder}/"):
            self.seen.append(f"{event} {path!r}")


def _too_late(*_):
    raise TimeoutError(f"more than {_HANGS} s")


@contextlib.contextmanager
def watched(folder):
    """Fails if the block starts a program, changes a file outside `folder`, takes SECONDS of CPU time, or raises the peak memory by 1 GB.

    Gives an object whose `opened` are the paths that the block has opened to read.
    """
    watch = _Watch(folder)
    before, started = _peak_kb(), time.process_time()
    # A call that hangs in the kernel ends too.
    previous = signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, _HANGS)
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.pop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert watch.seen == [], watch.seen
    assert (taken := time.process_time() - started) < SECONDS, f"{taken:.1f} s"
    assert (grown := _peak_kb() - before) < 1_000_000, f"{grown:,} kB"


def _peak_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def assert_lines(problems):
    """Each problem is one printable line that a person can read."""
    assert problems
    for problem in problems:
        assert problem.isprintable() and len(problem) < 21_000, problem[:300]
