"""Real processes killed at random moments and in chosen places: every restart resumes, and the end is bit for bit that of an unbroken run.

The chosen places are short: encoding, compiling, the write of a compiled program, the removal of old checkpoints. A random moment hardly
ever hits them, so the test watches the files of the run, and kills when the place has begun.

A run of two processes has devices of both in its mesh. In a run with experts, the state has more than the optimizer's: each router's bias.
A run on chats packs whole conversations into rows; with adapters, most of its state is frozen. In runs with `sync:` it has what each
replica has for itself, the outer momentum, or what roundings took away. Their checkpoints, of every second step, are of states inside
phases of three steps and at exchanges.

The same on a bucket, whose server answers some requests by 500 or 503, some not at all, and some after it has done them without an answer.
"""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from buckets import Server
from runs import flags, free_port, rows

from jgt import document
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import FOLDER, open_steps
from train.config import load
from train.setup import prepare

STEPS = 12
ORIGIN = 4
"""The checkpoint that a start with `--resume PATH` begins from."""
OVERRIDES = [
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    "train.log_every=1",
    "watchdog={join_seconds: 20, peer_seconds: 2, step_seconds: 20}",
]
RULES = {
    "axes": {"batch": ["data", "fsdp"]},
    "signals": {"layers/*": {"params": {"*/kernel": ["fsdp", None]}, "out": ["batch", None, None]}},
    "default": "replicate",
}
EXPERTS = {
    "axes": {"batch": ["data", "expert"]},
    "signals": {"layers/moe": {"params": {"experts/*": ["expert", None, None]}, "experts": {"axis": "expert"}}},
    "default": "replicate",
}
HYBRID = {
    "axes": {"batch": ["replica", "fsdp"]},
    "signals": {"layers/*": {"params": {"*/kernel": ["fsdp", None]}, "out": ["batch", None, None]}},
    "default": "replicate",
}
PHASES = "sync={axis: replica, every: 3, wire: int8, outer: {lr: 0.9, momentum: 0.5}}"
LATE = "sync={axis: replica, late: 1}"
MOMENTS = {"encode": 0.05, "compile": 0.4, "cache": 0.1, "saved": 0.2, "retention": 0.005, "exchange": 0.03, "anywhere": 0.0}
"""When a kill comes: after the beginning of this, and up to so many seconds later."""
KEEP = 2
TRASH = "trash"
BIAS = ".variables['layers']['moe']['bias']"
"""The place of the routers' biases in the state of a run with experts."""
LONGEST_SECONDS = 300
ON_BUCKETS = ["saved", "retention", "anywhere", "anywhere", "compile"]
FAULTS = {"error": 0.1, "lost": 0.02, "stall": 0.01}
"""The shares of requests that a store does not answer as it should."""
LATER = ["retention", "anywhere", "anywhere"]
SHORT = ("1", "auto", ["encode", "anywhere", "retention"])
"""The one that is not slow."""
DEFAULT = [
    ("1", "auto", ["encode", "encode", "compile", "cache", "anywhere", "anywhere", "anywhere", "anywhere", "retention"]),
    ("1", "never", ["encode", "anywhere", "anywhere", "anywhere"]),
    ("1", "path", ["encode", "encode", "anywhere", "retention"]),
    ("2", "auto", ["encode", "anywhere", "retention"]),
    ("experts", "auto", ["saved"]),
]
SHARES = 9
"""The slow tests: so many shares of eight kills for each kind of start, with one process and with two, and with experts."""
SYNC_SHARES = 2
"""The slow tests of runs with `sync:`: so many shares of seven kills for each layout."""
PACKED_SHARES = 2
"""The slow tests of runs on packed conversations: so many shares of six kills for each layout."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What runs differ in. count: the number of processes. options: for the model. here: a mesh of this process' devices, with replicas."""

    count: int
    mesh: str
    rules: dict
    options: tuple[str, ...] = ()
    here: str | None = None


BALANCED = "model.experts={count: 4, choose: 2, ffn: 32, balance: bias, balance_rate: 0.01}"
REPLICAS = "mesh={replica: 2, fsdp: 4}"
CHATS = ("data={source: chat, path: CHATS, packing: true, eval_tokens: 0}", "model.seq=128")
"""Rows of about four conversations."""
LAYOUTS = {
    "1": Layout(count=1, mesh="mesh={data: 1, fsdp: 2}", rules=RULES),
    "2": Layout(count=2, mesh="mesh={data: 2, fsdp: 2}", rules=RULES),
    "experts": Layout(
        count=1,
        mesh="mesh={data: 1, expert: 2}",
        rules=EXPERTS,
        options=(BALANCED,),
    ),
    "pipeline": Layout(
        count=1,
        mesh="mesh={stage: 2, data: 1, fsdp: 1, tensor: 1}",
        rules=document.read("jgt:rules/pipeline").plain(),
        options=("pipeline={signal: layers, microbatches: 2, schedule: 1f1b}",),
        here="mesh={stage: 2, data: 2, fsdp: 2, tensor: 1}",
    ),
    "packed": Layout(count=1, mesh="mesh={data: 1, fsdp: 2}", rules=RULES, options=CHATS),
    "packed-lora": Layout(count=1, mesh="mesh={data: 1, fsdp: 2}", rules=RULES, options=(*CHATS, "lora={rank: 4, alpha: 8}")),
    "phases": Layout(count=1, mesh="mesh={replica: 2, fsdp: 1}", rules=HYBRID, options=(PHASES,), here=REPLICAS),
    "phases2": Layout(count=2, mesh="mesh={replica: 2, fsdp: 2}", rules=HYBRID, options=(PHASES,), here=REPLICAS),
    "late": Layout(count=1, mesh="mesh={replica: 2, fsdp: 1}", rules=HYBRID, options=(LATE,), here=REPLICAS),
    "late2": Layout(count=2, mesh="mesh={replica: 2, fsdp: 2}", rules=HYBRID, options=(LATE,), here=REPLICAS),
    "phases-experts": Layout(
        count=1,
        mesh="mesh={data: 2, expert: 1}",
        rules=EXPERTS,
        options=(BALANCED, PHASES.replace("replica", "data")),
        here="mesh={data: 2, expert: 4}",
    ),
}
SYNC = tuple(name for name in LAYOUTS if name.startswith(("phases", "late")))
PLAIN = ("1", "2", "experts")
PACKED = ("packed", "packed-lora")


@dataclass(frozen=True, kw_only=True)
class Straight:
    """An uninterrupted run: its folder, its processes' seconds without compiling, and its outcome."""

    folder: Path
    seconds: float
    states: dict
    losses: dict


@pytest.fixture(scope="module")
def runs(nursery, tiny_file, tmp_path_factory):
    """The uninterrupted runs, and all that a killed one needs to be started with the same command."""
    found = Runs(nursery, tiny_file, tmp_path_factory.mktemp("runs"))
    yield found
    found.close()


class Runs:
    def __init__(self, nursery, tiny_file, folder):
        self._nursery, self._file, self._folder = nursery, tiny_file, folder
        self._texts, self._chats = folder / "texts.jsonl", folder / "chats.jsonl"
        self._servers, self._on = {}, {}
        for name, layout in LAYOUTS.items():
            self._rules(name).write_text(document.dump(layout.rules))
        # Many short documents, so that encoding takes long enough to be hit.
        self._texts.write_text("".join(json.dumps({"text": str(i * i)}) + "\n" for i in range(30_000)))
        chats = ((("user", f"{i} + 1?"), ("assistant", str(i + 1))) for i in range(5_000))
        messages = ([{"role": role, "content": text} for role, text in chat] for chat in chats)
        self._chats.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
        self._straight = {}

    def start(self, folder, name, *more):
        """Starts the processes of a run with this layout. Their logs are beside its folder."""
        return [
            self._nursery.start(
                [*self._arguments(folder, name), *more, *joined], folder.with_suffix(f".{i}.log"), self._environment(folder)
            )
            for i, joined in enumerate(self._joined(LAYOUTS[name].count))
        ]

    def put_on(self, store, folder):
        """From now on, the run of this folder has its checkpoints on a store, which fails in some requests."""
        if store not in self._servers:
            self._servers[store] = Server(store)
            self._servers[store].faults(**FAULTS)
        self._on[folder] = self._servers[store]
        # To look at the bucket from here.
        os.environ.update(self._on[folder].environment)

    def place(self, folder):
        """The URL or the folder of a run."""
        return f"{self._on[folder].url}/{folder.parent.name}/{folder.name}" if folder in self._on else folder

    def steps(self, folder):
        """The steps of a run."""
        return open_steps(f"{self.place(folder)}/{FOLDER}" if folder in self._on else folder / FOLDER)

    def close(self):
        for server in self._servers.values():
            server.close()

    def _environment(self, folder):
        return self._on[folder].environment if folder in self._on else {}

    def _joined(self, count):
        port = free_port()
        return [flags(port, count, i) if count > 1 else [] for i in range(count)]

    def _rules(self, name):
        return self._folder / f"rules-{name}.yaml"

    def _options(self, name):
        return [option.replace("CHATS", str(self._chats)) for option in LAYOUTS[name].options]

    def _arguments(self, folder, name):
        layout, data = LAYOUTS[name], f"data={{source: jsonl, path: {self._texts}, eval_tokens: 0}}"
        spool = [f"run.spool={folder}", "run.copy_seconds=1", "run.lease_seconds=15"] if folder in self._on else []
        options = [
            f"run.dir={self.place(folder)}",
            *spool,
            f"rules={self._rules(name)}",
            layout.mesh,
            "devices.virtual_cpu=2",
            data,
            *self._options(name),
        ]
        return ["--config", str(self._file), *options, *OVERRIDES]

    def straight(self, name):
        """The uninterrupted run with this layout, once for all tests of this process."""
        if name not in self._straight:
            folder, begun = self._folder / f"straight{name}", time.perf_counter()
            # Kept, so that other runs can begin from them.
            children = self.start(folder, name, f"checkpoint.keep={STEPS}")
            assert ended(children) == [0] * len(children), folder.with_suffix(".0.log").read_text()
            compiling = sum(event["seconds"] for event in rows(folder / "events.jsonl") if event["phase"] in ("init", "compile"))
            seconds, (states, losses) = time.perf_counter() - begun - compiling, self.outcome(folder, name)
            self._straight[name] = Straight(folder=folder, seconds=seconds, states=states, losses=losses)
        return self._straight[name]

    @functools.cache  # noqa: B019 - one object for a module
    def _setup(self, name):
        layout, folder = LAYOUTS[name], f"run.dir={self._folder / 'none'}"
        # On all devices of this process. A state of replicas can be read on any mesh with as many of them.
        mesh = [layout.here, f"rules={self._rules(name)}"] if layout.here else []
        return prepare(load(self._file, [folder, *mesh, *self._options(name), *OVERRIDES]))

    def outcome(self, folder, name):
        """The state at the end, with its place in it, and the loss of every step."""
        found, reports = find_checkpoint(self.place(folder))
        assert reports == [] and found.manifest.step == STEPS
        setup = self._setup(name)
        state = jax.device_get(restore(found, setup.shapes, setup.shardings))
        losses = {row["step"]: row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row}
        return {jax.tree_util.keystr(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(state)}, losses


def ended(children):
    """Waits for the processes of a run to end by themselves. Returns their exit codes."""
    return [child.wait(LONGEST_SECONDS) for child in children]


def begins(moment, folder, steps, cache, seconds):
    """A function that says whether a moment of this start has begun. seconds: how long the start takes at most."""
    until, now, cached = time.monotonic() + seconds, time.time(), len(list(cache.iterdir()))
    left = set((folder / "data").glob("*.tmp"))
    return {
        "encode": lambda: set((folder / "data").glob("*.tmp")) - left,
        "compile": lambda: any(row["phase"] in ("init", "restore") and row["time"] > now for row in rows(folder / "events.jsonl")),
        "cache": lambda: len(list(cache.iterdir())) > cached,
        "saved": lambda: steps.listed(),
        # The last step of a phase begins now.
        "exchange": lambda: any(row["step"] % 3 == 2 and row["time"] > now for row in rows(folder / "metrics.jsonl")),
        "retention": lambda: (folder / FOLDER / TRASH).exists() or len(steps.listed()) > KEEP,
        "anywhere": lambda: time.monotonic() > until,
    }[moment]


def kill(children, moment, has_begun, chance):
    """Kills one process of a run, or all, at a moment. Returns whether any of them was still running."""
    while not has_begun():
        if all(child.poll() is not None for child in children):
            return False
        time.sleep(0.001)
    time.sleep(chance.uniform(0, MOMENTS[moment]))
    victims = chance.choice([children, *([child] for child in children)])
    there = [child.poll() is None for child in victims]
    for child in victims:
        child.send_signal(signal.SIGKILL)
    return any(there)


def check_end(folder, codes, steps, *, killed):
    """The processes of a run ended well unless they were killed, and every listed step is complete."""
    log = folder.with_suffix(".0.log")
    # A process that is killed at once has not opened its log.
    output = log.read_text() if log.exists() else ""
    assert killed or not any(codes), output
    assert "damaged" not in output
    assert all(steps.open(step).manifest.step == step for step in steps.listed())


def orphans(steps):
    """Objects of a bucket that no step has."""
    kept = {steps.open(step).manifest.objects.folder for step in steps.listed()}
    return [name for name in steps.bucket.names("data/") if name.split("/")[1] not in kept]


def prepared(folder, straight, resume):
    """The further arguments of a run that is started with `--resume`, and the first step that it trains."""
    if resume == "never":
        # A finished run is in the way; its encoded text is not.
        shutil.copytree(straight.folder, folder, ignore=shutil.ignore_patterns("data"))
        return ["--resume", "never"], 1
    if resume == "path":
        return ["--resume", str(straight.folder / FOLDER / str(ORIGIN))], ORIGIN + 1
    return [], 1


def shares():
    """The slow tests: name, resume, moments."""
    chance = random.Random(0)
    for name, resume in itertools.product(PLAIN, ("auto", "never", "path")):
        for share in range(SHARES if resume == "auto" else SHARES // 2):
            moments = ["encode", chance.choice(["compile", "cache"]), *chance.choices(LATER, k=6)]
            yield pytest.param(name, resume, moments, marks=pytest.mark.slow, id=f"{name}-{resume}-{share}")
    for name, share in itertools.product(SYNC, range(SYNC_SHARES)):
        moments = ["exchange", "exchange", "saved", *chance.choices(["exchange", "anywhere", "anywhere"], k=4)]
        yield pytest.param(name, "auto", moments, marks=pytest.mark.slow, id=f"{name}-auto-{share}")
    for name, share in itertools.product(PACKED, range(PACKED_SHARES)):
        moments = ["encode", "saved", *chance.choices(LATER, k=4)]
        yield pytest.param(name, "auto", moments, marks=pytest.mark.slow, id=f"{name}-auto-{share}")


@pytest.mark.parametrize(
    ("name", "resume", "moments"),
    [
        pytest.param(*SHORT, id="short"),
        *(pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow) for case in DEFAULT),
        *shares(),
    ],
)
def test_a_killed_run_ends_where_the_unbroken_one_ends(name, resume, moments, runs, tmp_path):
    kill_and_compare(name, resume, moments, runs, tmp_path)


def bucket_shares():
    """The tests on a bucket: store, name, moments."""
    chance, names = random.Random(1), ["1", "2", "experts", "pipeline"]
    yield pytest.param("s3", "1", ["saved", "anywhere"], id="s3-short", marks=pytest.mark.slow)
    for store, count in (("s3", 20), ("gs", 8)):
        for share in range(count):
            yield pytest.param(store, names[share % 4], chance.choices(ON_BUCKETS, k=5), id=f"{store}-{share}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("store", "name", "moments"), [*bucket_shares()])
def test_a_killed_run_on_a_bucket_ends_where_the_unbroken_one_ends(store, name, moments, runs, tmp_path):
    pytest.importorskip("moto")
    kill_and_compare(name, "auto", moments, runs, tmp_path, store)


def kill_and_compare(name, resume, moments, runs, tmp_path, store=None):
    straight, chance, left = runs.straight(name), random.Random(str(moments)), list(moments)
    cache = tmp_path / "compiled"
    cache.mkdir()
    # Compiling once more takes seconds. Only a kill that waits for it needs an empty cache.
    options = [f"checkpoint.keep={KEEP}", *([f"xla.cache={cache}"] if {"compile", "cache"} & set(moments) else [])]
    for life in itertools.count():
        folder = tmp_path / f"broken{life}"
        if store is not None:
            runs.put_on(store, folder)
        steps = runs.steps(folder)
        more, first = prepared(folder, straight, resume)
        killed = True
        while left and killed:
            # A run that ends before the moment comes has had its chance of it.
            moment = left.pop(0)
            has_begun = begins(moment, folder, steps, cache, chance.uniform(0.1, straight.seconds))
            children = runs.start(folder, name, *options, *more)
            killed = kill(children, moment, has_begun, chance)
            check_end(folder, ended(children), steps, killed=killed)
        if killed:
            check_end(folder, ended(runs.start(folder, name, *options, *more)), steps, killed=False)
        states, losses = runs.outcome(folder, name)
        assert losses == {step: loss for step, loss in straight.losses.items() if step >= first}
        assert states.keys() == straight.states.keys()
        assert name != "experts" or np.any(states[BIAS])
        for place, expected in straight.states.items():
            np.testing.assert_array_equal(states[place], expected, err_msg=place)
        assert not [*folder.glob("data/*.tmp"), *folder.glob(f"{FOLDER}/*.saving"), *folder.glob(f"{FOLDER}/{TRASH}")]
        assert store is None or not orphans(steps)
        if not left:
            break
