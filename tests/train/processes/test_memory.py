"""The memory of a process over many steps."""

import time
from pathlib import Path

import numpy as np
import pytest
from runs import rows

STEPS = 8_000
MOST = 1024
"""Bytes per step by which the second half of the run may grow. A list that gets a number in each step grows by about 40."""
SECONDS = 1200


def resident(pid):
    """Bytes of memory in use."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def last_step(path):
    """The last step of a log that may be long."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 4000, 0))
        tail = path.with_name("tail.jsonl")
        tail.write_bytes(b"".join(file.read().splitlines(keepends=True)[1:]))
    return max((row["step"] for row in rows(tail)), default=0)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(nursery, tiny_file, tmp_path):
    folder = tmp_path / "run"
    options = [f"train.steps={STEPS}", "train.log_every=1", "train.eval_every=400", "checkpoint.every=200", "data.eval_tokens=2000"]
    child = nursery.start(["--config", str(tiny_file), f"run.dir={folder}", *options], tmp_path / "log")
    measured, deadline = [], time.monotonic() + SECONDS
    while child.poll() is None:
        assert time.monotonic() < deadline, f"only {last_step(folder / 'metrics.jsonl')} steps"
        time.sleep(0.5)
        if (step := last_step(folder / "metrics.jsonl")) > STEPS // 2 and child.poll() is None:
            measured.append((step, resident(child.pid)))
    assert child.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    steps, used = np.array(measured, float).T
    assert len(steps) > 20
    slope = np.polyfit(steps, used, 1)[0]
    print(f"{slope:.0f} bytes per step")
    assert slope < MOST
