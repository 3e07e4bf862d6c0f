"""A run in a notebook: steps share a line, evaluations stay, and in a real kernel an interrupt ends the run but never the kernel."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.records import console
from train.records.console import Notebook, Screen, find_notebook

ROOT = Path(__file__).parents[3]


class Cell:
    """The outputs of a cell, as IPython's display keeps them."""

    def __init__(self):
        self.outputs, self.updates = [], 0

    def display(self, data, *, raw, display_id):
        assert raw and display_id
        at = len(self.outputs)
        self.outputs.append(data["text/plain"])
        return SimpleNamespace(update=lambda data, raw: self._update(at, data["text/plain"]))

    def write(self, text):
        self.outputs.append(text.rstrip())

    def _update(self, at, text):
        self.outputs[at] = text
        self.updates += 1


@pytest.fixture
def cell(monkeypatch):
    """The cell of a notebook whose clock stands still."""
    cell, now = Cell(), SimpleNamespace(seconds=100.0)
    cell.now = now
    monkeypatch.setattr(console.time, "monotonic", lambda: now.seconds)
    return cell


def test_a_line_replaces_the_one_before_it(cell):
    shown = Notebook(cell.display)
    for step in range(100):
        cell.now.seconds += 0.05
        shown.show_line(f"step {step}")
    shown.end_line()
    assert cell.outputs == ["step 99"] and 20 <= cell.updates <= 26
    shown.show_line("step 100")
    shown.end_line()
    shown.end_line()
    assert cell.outputs == ["step 99", "step 100"]


def test_evaluations_and_other_lines_stay(cell, monkeypatch):
    monkeypatch.setattr("train.records.console.find_notebook", lambda: Notebook(cell.display))
    screen = Screen(enabled=True)
    monkeypatch.setattr(screen._stdout, "write", cell.write)
    for step in range(1, 5):
        screen.step(step, 4, {"loss": float(step)})
        if step % 2 == 0:
            screen.step(step, 4, {"eval_loss": 0.5})
    screen.say("done")
    assert [line.partition("  ")[0] + line.partition(" loss")[1] for line in cell.outputs[:2]] == ["step 2/4 loss", "step 2/4"]
    assert len(cell.outputs) == 5 and cell.outputs[-1] == "done"


def test_a_program_outside_of_a_notebook_has_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert find_notebook() is None
    shell = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=print)))
    assert find_notebook() is None
    shell.kernel = object()
    assert isinstance(find_notebook(), Notebook)


# -- a real kernel ---------------------------------------------------------------------------------------------------

CONFIG = """
import jgt
config = {
    "run": {"name": "first"},
    "model": {"kind": "llama", "layers": 1, "embed": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 256, "seq": 32},
    "data": {"source": "text", "path": "text.txt", "eval_tokens": 0},
    "train": {"steps": 40, "batch": 16},
    "log": ["jsonl"],
}
"""
COMPILED = """
import jax
compiled = []
jax.monitoring.register_event_listener(lambda event, **_: compiled.append(event) if event.endswith("cache_misses") else None)
"""
SLOW = """
import time
from jgt.command.trainer import trainer
Records = trainer("records.records").Records
quick = Records.metrics
def slow(*arguments):
    print("step under way")
    time.sleep(10)
Records.metrics = slow
"""
ENDLESS = "config, ['run.name=endless', 'train.steps=1000000']"
CELLS = [
    f"{CONFIG}first = jgt.run(config)",
    f"{COMPILED}second = jgt.run(config, ['run.name=second', 'optimizer.lr=1e-4'])\nlen(compiled)",
    f"stopped = jgt.run({ENDLESS})\nstopped.is_done",
    # A first interrupt waits for the step under way, here ten seconds. The second does not.
    f"{SLOW}\njgt.run({ENDLESS})",
    f"Records.metrics = quick\njgt.run({ENDLESS.replace('1000000', '10')}, resume='never').step",
]
INTERRUPTS = {2: [1], 3: [1, 2]}


@pytest.mark.slow
def test_a_real_kernel_outlives_interrupts(tmp_path, monkeypatch):
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    (tmp_path / "text.txt").write_text(" ".join(str(i * i) for i in range(4000)))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(book, timeout=90, kernel_name="python3", allow_errors=True, resources=resources)
    asyncio.run(_run(client, book))
    first, second, stopped, interrupted, last = [cell.outputs for cell in book.cells]
    lines = [output["data"]["text/plain"] for output in first if output["output_type"] == "display_data"]
    assert sum(line.startswith("step ") for line in lines) == 1 and any(line.startswith("step 40/40") for line in lines)
    assert "Run directory: runs/first" in _text(first)
    assert second[-1]["data"]["text/plain"] == "0"
    assert stopped[-1]["data"]["text/plain"] == "False" and "SIGINT: the steps under way" in _text(stopped)
    assert interrupted[-1]["ename"] == "KeyboardInterrupt" and "second signal" in _text(interrupted)
    assert last[-1]["data"]["text/plain"] == "10"


async def _run(client, book):
    async with client.async_setup_kernel():
        for index, cell in enumerate(book.cells):
            running = asyncio.create_task(client.async_execute_cell(cell, index))
            for seconds in INTERRUPTS.get(index, []):
                while not any("step " in str(output) for output in cell.outputs) and not running.done():
                    await asyncio.sleep(0.1)
                await asyncio.sleep(seconds)
                await client.km.interrupt_kernel()
            await running


def _text(outputs):
    return "".join(output.get("text", "") for output in outputs)
