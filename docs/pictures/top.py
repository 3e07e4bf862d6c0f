"""Draws top.svg: the screen of `jgt top` while two processes train the quickstart's model, after a profile. It takes a minute or two.

python docs/pictures/top.py
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from terminal import FORMAT

import jgt
from train.journal.status import ask
from train.watch.top.frame import Line, draw_frame
from train.watch.top.view import Watched

PICTURE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 120, 34
COMMAND = ["launch", "--processes", "2", "--", "jgt:quickstart", "mesh={data: 2, fsdp: 2, tensor: 1}", "devices.virtual_cpu=2"]
SIGNALS = Path("profile") / "signals.json"
SECONDS = 30.0
"""The seconds of steps after the profile."""


def frame(run: Path) -> list[Line]:
    """A frame of a run that this function starts and ends."""
    command = [sys.executable, "-m", "jgt", *COMMAND, f"run.dir={run}", "train.steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(run / "metrics.jsonl")
        ask(run, "profile")
        _wait(run / SIGNALS)
        time.sleep(SECONDS)
        return draw_frame(Watched(run).read(lanes=2), WIDTH, HEIGHT)
    finally:
        process.terminate()
        process.wait()


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(0.5)


def draw(lines: list[Line]) -> str:
    """The picture of a frame."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(jgt.Console.styled(lines), soft_wrap=True)
    return console.export_svg(title="jgt top runs/quickstart", code_format=FORMAT, unique_id="top")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(draw(frame(Path(folder) / "quickstart")))
