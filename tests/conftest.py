"""The whole session is strict: 8 CPU devices, rank promotion raises, warnings are errors, a hung collective fails.

`pytest -m slow --share 2/5` runs the third fifth of the slow tests. CI runs another of 64 shares each time and all of them every night.
"""

import os
import signal
import tempfile
import zlib
from importlib import metadata

os.environ["JAX_PLATFORMS"] = "cpu"
# Programs of processes that tests start are kept for the session, not for the user.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jgt-tests-")
# Runs with rules of a test's own would each start a process that compares them. test_background.py sets run.verify itself.
os.environ["JGT_VERIFY"] = "off"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=60"
)

if metadata.version("jaxlib") < "0.11":
    # This code generator for fusions takes a third of the suite's time. The partitioned programs are the same without it. Later versions
    # have no such flag.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import hypothesis
import jax
import pytest

# On a busy machine an example may take longer than hypothesis allows by default.
hypothesis.settings.register_profile("jgt", deadline=None)
hypothesis.settings.load_profile("jgt")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A shell's background job starts with Ctrl-C ignored, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup SIGHUP is ignored, here and in all children. A handler is not inherited by them.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture
def root() -> "os.PathLike[str]":
    """The repository's root."""
    from pathlib import Path

    return Path(__file__).parent.parent


def pytest_configure(config):
    # Two threads for each device, as the trainer has them for exchanges in int8 (train/setup/xla.py), which are among the slow tests. JAX
    # has not opened its devices yet. The other tests do not need them, and would be slower.
    if config.option.markexpr:
        os.environ["NPROC"] = "16"


def pytest_addoption(parser):
    parser.addoption("--share", metavar="K/N", help="run only part K (from 0) of N parts of the tests, chosen by their names")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    listed = {line for line in (config.rootpath / "tests" / "slow.txt").read_text().splitlines() if line and not line.startswith("#")}
    if not any("::" in arg for arg in config.args):
        collected = {item.path for item in items}
        stale = {name for name in listed if config.rootpath / name.split("::")[0] in collected} - {item.nodeid for item in items}
        stale |= {name for name in listed if not (config.rootpath / name.split("::")[0]).exists()}
        if stale:
            raise pytest.UsageError("tests/slow.txt: these are not tests: " + ", ".join(sorted(stale)))
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
    share = config.getoption("--share")
    if share is not None:
        part, parts = map(int, share.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part % parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
