"""Hostile input for tests: values and mutations that keep the structure, and a watch over what the code under test does.

`JGT_FUZZ=5000 pytest -n 0 tests/train/test_hostile.py` looks for new faults: so many random examples a test instead of the same few.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

SECONDS = 5
_RANDOM = int(os.environ.get("JGT_FUZZ", "0"))


def fuzz(examples):
    """The settings of a fuzz: the same examples each time unless JGT_FUZZ says otherwise."""
    return settings(
        max_examples=_RANDOM or examples,
        derandomize=not _RANDOM,
        database=None,
        deadline=SECONDS * 1000,
        suppress_health_check=list(HealthCheck),
        # Explaining a failure would trace every line of the others.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )


# -- a watch -----------------------------------------------------------------------------------------------------

_RUNS = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watches = []


def _on_event(event, arguments):
    if not _watches:
        return
    if event in _RUNS:
        _watches[-1].seen.append(f"{event} {arguments}")
    elif event == "open":
        path, mode, flags = arguments
        if (set(mode or "") & set("wax+")) or (mode is None and flags & _WRITING):
            _watches[-1].changed(event, path)
    elif event in _CHANGES:
        _watches[-1].changed(event, arguments[1] if event in ("os.symlink", "os.link") else arguments[0])
        if event == "os.rename":
            _watches[-1].changed(event, arguments[1])


# A hook stays for the life of the process; without a watch it does nothing.
sys.addaudithook(_on_event)


class _Watch:
    def __init__(self, folder):
        self.folder, self.seen = os.path.realpath(folder), []

    def changed(self, event, path):
        if isinstance(path, int) or Path(os.fsdecode(path)).suffix == ".pyc" or "__pycache__" in str(path):
            return
        if not f"{os.path.realpath(path)}/".startswith(f"{self.folder}/"):
            self.seen.append(f"{event} {path!r}")


def _too_late(*_):
    raise TimeoutError(f"more than {SECONDS} s")


@contextlib.contextmanager
def watched(folder):
    """Fails when what runs inside starts something, changes a file outside of `folder`, takes SECONDS or 1 GB more than before."""
    watch = _Watch(folder)
    before, started = _peak_kb(), time.perf_counter()
    # A call that hangs in the kernel ends too.
    previous = signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.pop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert watch.seen == [], watch.seen
    assert (taken := time.perf_counter() - started) < SECONDS, f"{taken:.1f} s"
    assert (grown := _peak_kb() - before) < 1_000_000, f"{grown:,} kB"


def _peak_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def assert_lines(problems):
    """Each problem is one printable line that a person can read."""
    assert problems
    for problem in problems:
        assert problem.isprintable() and len(problem) < 21_000, problem[:300]


# -- values ------------------------------------------------------------------------------------------------------

NUMBERS = [-1, 0, 2, 2**31, 2**32, 2**63, 10**18, 10**30, 10**390, -(10**390), 1e308, 5e-324, -0.0, float("inf"), float("-inf"), float("nan"), 0.5]
TEXTS = [
    "",
    " ",
    "a\nb",
    "\x1b[31mred",
    "a\0b",
    "\x85\u2028\u202e",
    "..",
    "../../up",
    "/dev/zero",
    "/dev/null/x",
    "a" * 300,
    "a/" * 300,
    "x" * 70_000,
    "9" * 5_000,
    "1e999",
    "*" * 60 + "x",
    "**/" * 60 + "x",
    "{,a}" * 60 + "x",
    "{" * 60,
    "[" * 60,
    "!!python/object/apply:os.system [touch canary]",
    "<<",
    "extends",
    "%s%n{0}${HOME}",
    "gpipe",
    ".csv",
    "nan",
    "2024-01-01",
]


def nested(depth, inner=None):
    """Lists in lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


TREES = [[], {}, {"": 1}, {"<<": {"a": 1}}, {"a\nb": 1}, {"x" * 3000: [1] * 50}, nested(20), nested(40), [[]] * 50, dict.fromkeys(map(str, range(50)))]
values = st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *TREES]) | st.integers(-3, 70) | st.text(max_size=8)


def _places(tree, path=()):
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def _changed(tree, path, change):
    """The tree with `change` applied to the container and key at a path."""
    tree = tree.copy()
    if len(path) == 1:
        change(tree, path[0])
    else:
        tree[path[0]] = _changed(tree[path[0]], path[1:], change)
    return tree


@st.composite
def mutated(draw, tree, most=3):
    """A tree of dicts, lists and scalars with up to `most` values replaced, removed, doubled, moved or renamed."""
    for _ in range(draw(st.integers(1, most))):
        places = [path for path in _places(tree) if path]
        if not places:
            return draw(values)
        value, name, kind = draw(values), draw(st.sampled_from(TEXTS)), draw(st.sampled_from(["set", "set", "set", "drop", "wrap", "name", "move"]))
        other = draw(st.sampled_from(places))

        def change(container, key, value=value, name=name, kind=kind, other=other, tree=tree):
            if kind == "drop":
                del container[key]
            elif kind == "wrap":
                container[key] = [container[key]] if draw(st.booleans()) else {"a": container[key]}
            elif kind == "name" and isinstance(container, dict):
                container[name] = container.pop(key)
            elif kind == "move":
                moved = tree
                for part in other:
                    moved = moved[part]
                container[key] = moved
            else:
                container[key] = value

        tree = _changed(tree, draw(st.sampled_from(places)), change)
    return tree


PIECES = [b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"\t", b": ", b"- ", b"[", b"]" * 9, b"{" * 40, b"[" * 3000, b"&a ", b"*a ", b"!!x ", b"<<: ", b"---\n", b"...\n", b'"', b"'", b"|\n", b"%", b"#", b"1e999", b"9" * 5000, b"\xed\xa0\x80", b"\\ud800", b","]


@st.composite
def spoiled(draw, data, most=3):
    """Bytes with up to `most` parts replaced, removed, doubled or cut off."""
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, len(data)))
        stop = min(start + draw(st.sampled_from([0, 0, 1, 1, 2, 7, 50])), len(data))
        kind = draw(st.sampled_from(["piece", "piece", "bytes", "double", "flip", "cut"]))
        if kind == "piece":
            data = data[:start] + draw(st.sampled_from(PIECES)) + data[stop:]
        elif kind == "bytes":
            data = data[:start] + draw(st.binary(max_size=4)) + data[stop:]
        elif kind == "double":
            data = data[:stop] + data[start:]
        elif kind == "flip" and start < len(data):
            data = data[:start] + bytes([data[start] ^ (1 << draw(st.integers(0, 7)))]) + data[start + 1 :]
        elif kind == "cut":
            data = data[:start]
    return data
