"""What a person sees: tables, a line a step, a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jgt.pipeline.config import Pipeline
from jgt.pipeline.custom import find_table
from jgt.pipeline.simulate import simulate
from jgt.plan.units import size_text
from train.setup import Setup

WIDTH_OF_FILES = 160
"""Columns of a table where there is no terminal."""


class Screen:
    """Writes to stdout; on processes other than the first, nothing."""

    def __init__(self, *, enabled: bool):
        self._console = Console(quiet=not enabled, highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
        bar = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self._progress = Progress(*bar, console=self._console, transient=True, disable=not (enabled and self._console.is_terminal))
        self._task = self._progress.add_task("steps", total=None)

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(Text(text), soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[list[str]], numbers: int) -> None:
        """A table whose last `numbers` columns are aligned to the right."""
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index >= len(columns) - numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def setup(self, setup: Setup) -> None:
        """The mesh and where the parameters are."""
        self.say(describe_mesh(setup))
        self.say(describe_kernels(setup))
        if setup.run.pipeline is not None:
            self.say(describe_pipeline(setup.run.pipeline, setup.mesh.shape[setup.run.pipeline.axis]))
        rows = [
            [p.path, ", ".join(p.signals) or "(none)", "x".join(map(str, p.shape)), p.spec, size_text(p.bytes_per_device(setup.mesh))]
            for p in setup.placement.parameters
        ]
        total = sum(p.bytes_per_device(setup.mesh) for p in setup.placement.parameters)
        rows.append([f"{setup.num_parameters:,} parameters", "", "", "", size_text(total)])
        self.table("Parameters", ["name", "signal", "shape", "spec", "bytes/device"], rows, numbers=1)

    def start_steps(self, done: int, total: int) -> None:
        """Shows the bar."""
        self._progress.update(self._task, completed=done, total=total)
        self._progress.start()

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """A logged step."""
        self._progress.update(self._task, completed=step)
        self.say(f"step {step:>{len(str(total))}}/{total}  " + "  ".join(_shown(name, metrics) for name in _LINE if metrics.get(name) is not None))

    def stop_steps(self) -> None:
        """Takes the bar away."""
        self._progress.stop()


_LINE = ("loss", "eval_loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu")


def _shown(name: str, metrics: Mapping[str, Any]) -> str:
    value = metrics[name]
    if name == "step_time_s":
        return f"{value * 1000:.0f} ms"
    if name == "tokens_per_s":
        return f"{value:,.0f} tokens/s"
    if name == "mfu":
        return f"mfu {value:.1%}"
    if name == "lr":
        return f"lr {value:.2e}"
    return f"{name} {value:.4f}"


def describe_pipeline(pipeline: Pipeline, num_stages: int) -> str:
    """The schedule, its bubble if the passes of a layer cost alike, and its peak."""
    table = find_table(pipeline.schedule, num_stages, pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    found = simulate(table)
    return (
        f"Pipeline: {table.name} over {pipeline.axis} {num_stages}, {table.num_microbatches} microbatches: "
        f"bubble {found.bubble:.1%}, at most {found.peak:g} activations of a stage at once"
    )


def describe_kernels(setup: Setup) -> str:
    """Which attention kernel, and why not cuDNN's; in how many chunks the loss."""
    kernel = "cuDNN's kernel" if setup.attention.kernel == "cudnn" else "XLA's program"
    why = f" ({setup.attention.why})" if setup.attention.why else ""
    chunks = "" if setup.loss_chunks == 1 else f"; loss in {setup.loss_chunks} chunks of the sequence"
    return f"Attention: {kernel}{why}{chunks}"


def describe_mesh(setup: Setup) -> str:
    """The mesh in a line."""
    axes = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items())
    if not isinstance(setup.mesh, Mesh):
        return f"Mesh: {axes} = {setup.mesh.size} devices, none of them touched"
    devices = setup.mesh.devices
    kinds = ", ".join(sorted({d.device_kind for d in devices.flat}))
    hosts = len({d.process_index for d in devices.flat})
    over = f" on {hosts} processes" if hosts > 1 else ""
    alone = "" if setup.run.rules is not None else " (no rules: the model runs as it is, on one device)"
    return f"Mesh: {axes} = {devices.size} x {kinds}{over}{alone}"
