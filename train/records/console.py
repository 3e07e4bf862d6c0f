"""The lines that a person sees of a run: a description and a table at the start, and a line for each logged step.

On a terminal nothing is broken inside a word: step lines fit (`step_line`), and other lines that are longer than the screen continue below,
indented. In a file or a pipe a line stays one line, which can be searched, and step lines fit 80 columns, or as many as COLUMNS says. In a
notebook a step replaces the one before it, until an evaluation or another line follows: a cell of 10,000 lines cannot be read.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from jax.sharding import Mesh

from jgt import Console, PipelineConfig, Storage, amount

from ..journal.sink import Stdout
from ..setup import AUTO, Setup
from ..setup.program import ModelProgram
from .summary import step_line

_WIDTH_OF_FILES = 80
_NOTEBOOK_SECONDS = 0.2
"""The least time between two lines in a notebook."""


class Screen:
    """Prints to stdout. If it is not enabled, as on all processes except the first, it prints nothing."""

    def __init__(self, *, enabled: bool):
        self._stdout, self._enabled = Stdout(), enabled
        self.sink = self._stdout.sink
        self._console = Console(quiet=not enabled, file=cast(TextIO, self._stdout))
        self._notebook = find_notebook() if enabled else None

    def say(self, text: str) -> None:
        """Prints lines."""
        if not self._enabled:
            return
        if self._notebook is not None:
            self._notebook.end_line()
        if self._console.is_terminal:
            text = "\n".join(_folded(line, self._console.width) for line in text.split("\n"))
        # Past rich, which takes longer for a line than everything else that is done about a step.
        self._stdout.write(f"{text}\n")

    def table(self, title: str, columns: list[str], rows: list[list[str]], numbers: int) -> None:
        """Prints a table whose last `numbers` columns are aligned to the right."""
        self._console.print(Console.table(title, columns, len(columns) - numbers, rows))

    def setup(self, setup: Setup) -> None:
        """Prints the mesh, the attention kernel, the pipeline, and each parameter with its spec and its bytes per device."""
        lines = [describe_mesh(setup), describe_kernels(setup.program)]
        if setup.run.config.train.remat == AUTO:
            lines.append(f"Recompute: {setup.program.remat}, by train.remat: auto")
        if setup.run.pipeline is not None:
            lines.append(describe_pipeline(setup.run.pipeline, setup.mesh.shape[setup.run.pipeline.axis]))
        self.say("\n".join(filter(None, lines)))
        parameters = setup.storage.model.parameters
        # The bytes that a device keeps between steps.
        sizes = [p.bytes_per_device(setup.mesh) for p in setup.storage.placement.parameters]
        # The last row has the parameters without the optimizer's state, which has other shapes; the dry run shows it.
        rows = [
            (p.path, ", ".join(p.signals) or "(none)", "x".join(map(str, p.shape)), p.spec, size)
            for p, size in zip(parameters, sizes, strict=True)
        ]
        rows = [*folded_rows(rows), (f"{setup.num_parameters:,} parameters", "", "", "", sum(sizes))]
        names, signals, shapes, specs, counts = zip(*rows, strict=True)
        columns = {"name": names, "signal": signals, "shape": shapes, "spec": specs, "bytes/device": [amount(n, "B") for n in counts]}
        # Names and specs are what rules are written with.
        shown = Console.fitted(columns, self._console.width, ["shape"])
        self.table("Parameters", list(shown), list(map(list, zip(*shown.values(), strict=True))), numbers=1)
        for line in (*describe_choice(setup), *describe_storage(setup.storage)):
            self.say(line)

    def step(self, step: int, total: int, metrics: Mapping[str, object]) -> None:
        """Prints a logged step, or an evaluation."""
        line = step_line(step, total, metrics, self._step_width())
        if self._notebook is None or "eval_loss" in metrics:
            self.say(line)
            return
        self._notebook.show_line(line)
        if step == total:
            self._notebook.end_line()

    def _step_width(self) -> int:
        if self._console.is_terminal:
            return self._console.width
        columns = os.environ.get("COLUMNS", "")
        return int(columns) if columns.isdecimal() and 0 < int(columns) < 1000 else _WIDTH_OF_FILES


def folded_rows(rows: Sequence[tuple[str, str, str, str, int]]) -> list[tuple[str, str, str, str, int]]:
    """Rows of parameters, where those of equal layers are one: `blocks/* (48)` for blocks/0 to blocks/47. Its bytes are those of all."""
    groups: dict[tuple[str, ...], list[tuple[str, str, str, str, int]]] = {}
    for row in rows:
        name, signal = map(Console.of_any_layer, row[:2])
        groups.setdefault((name, signal, *row[2:4]), []).append(row)
    return [
        same[0] if len(same) == 1 else (f"{key[0]} ({len(same)})", key[1], key[2], key[3], sum(row[4] for row in same))
        for key, same in groups.items()
    ]


def _folded(line: str, width: int) -> str:
    """The line in pieces that fit the width, broken between words. A word that is too long stays whole, so that a path can be copied."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)


def describe_pipeline(pipeline: PipelineConfig, num_stages: int) -> str:
    """A line with the pipeline's schedule, its bubble, and its peak of activations.

    The bubble assumes that forward pass, backward pass for the activations, and backward pass for the weights cost the same.
    """
    simulation = pipeline.simulate(num_stages)
    table = simulation.table
    return (
        f"Pipeline: {table.name} over {pipeline.axis} {num_stages}, {table.num_microbatches} microbatches: "
        f"bubble {simulation.bubble:.1%}, at most {simulation.peak:g} activations of a stage in memory at once"
    )


def describe_kernels(program: ModelProgram) -> str:
    """A line with the kernels of attention and of experts, the reasons for them, and the number of chunks of the loss."""
    chunks = "" if program.loss_chunks == 1 else f"; loss in {program.loss_chunks} chunks of the sequence"
    experts = f"; experts: {program.grouped}" if program.grouped else ""
    return f"Attention: {program.attention.text}{experts}{chunks}" if program.attention is not None else ""


def describe_choice(setup: Setup) -> Iterator[str]:
    """A line about specs that were chosen by the sizes of a model that the rules of the file are not written for."""
    if setup.run.rules.is_chosen:
        named, parameters = setup.run.config.rules, setup.storage.model.parameters
        file = f"{named.value}" if named is not None and isinstance(named.value, str) else "otherwise:"
        num_split = sum(any(p.optimizer_dims) for p in parameters)
        yield f"{file} splits {num_split} of {len(parameters)} parameters, each by its size. jgt rules FILE writes them as a rules file"
        yield from setup.run.rules.notes


def describe_storage(storage: Storage) -> Iterator[str]:
    """Lines about parameters that are stored in another form than the model's."""
    if finely := storage.spread:
        yield f"{len(finely)} parameters are stored like their optimizer state between steps, and gathered at the start of each"
    for form in storage.padded:
        model, stored = (list(place.shape) for place in (form.model, form.stored))
        more = math.prod(stored) / math.prod(model) - 1
        yield f"{form.model.path} {model} is stored as {stored}, because its axes do not divide it: {more:.1%} more, all zero"


def describe_mesh(setup: Setup) -> str:
    """A line with the mesh: its axes, devices and processes."""
    axes = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items())
    if not isinstance(setup.mesh, Mesh):
        return f"Mesh: {axes} = {setup.mesh.size} devices, none of them used here"
    devices = setup.mesh.devices
    kinds = ", ".join(sorted({d.device_kind for d in devices.flat}))
    # Processes of the mesh, not of the run, which may be on one device.
    hosts = len({d.process_index for d in devices.flat})
    processes = f" on {hosts} processes" if hosts > 1 else ""
    return f"Mesh: {axes} = {devices.size} x {kinds}{processes}{_without_rules(setup)}"


def _without_rules(setup: Setup) -> str:
    if setup.run.rules_root is not None:
        return ""
    axes = " x ".join(axis for axis in setup.run.batch_dims[0] if setup.mesh.shape[axis] > 1)
    return f" (no rules: data-parallel, {axes} splits the batch)" if axes else " (no rules: the model runs unsharded on one device)"


class Notebook:
    """The cell that runs at the moment, with a line that is replaced by the next one, for the steps of a run. display: IPython's function.

    A notebook stores all that a cell prints, in its file too, so a run that prints each step makes it slow and long. A display that has a
    name can be replaced. The browser needs a moment for each, so a line that comes soon after another is held back, and shown only if none
    follows: `end_line` shows the last line and leaves it there.
    """

    def __init__(self, display: Callable[..., Any]):
        self._display = display
        self._handle: Any = None
        self._waiting: str | None = None
        self._shown_at = 0.0

    def show_line(self, line: str) -> None:
        """Shows a line in place of the one before it, now or with one of the next calls."""
        self._waiting = line
        if time.monotonic() - self._shown_at >= _NOTEBOOK_SECONDS:
            self._show()

    def end_line(self) -> None:
        """The line that was given last stays; the next one begins below."""
        if self._waiting is not None:
            self._show()
        self._handle = None

    def _show(self) -> None:
        data = {"text/plain": self._waiting}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._waiting, self._shown_at = None, time.monotonic()


def find_notebook() -> Notebook | None:
    """The notebook that this process is the kernel of, if it is one."""
    # A kernel has imported IPython long before.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return Notebook(ipython.display.display)
