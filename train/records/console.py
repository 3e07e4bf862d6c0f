"""What a person sees of a run: a few lines and a table at the start, a line per logged step, and a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO, cast

from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from jgt.console import make_console, make_table, size_text
from jgt.pipeline.config import Pipeline
from jgt.schedule.find import find_table
from jgt.schedule.simulate import simulate

from ..setup import Setup
from ..sink import Stdout


class Screen:
    """Prints to stdout. If it is not enabled, as on all processes except the first, it prints nothing."""

    def __init__(self, *, enabled: bool):
        stdout = Stdout()
        self.sink = stdout.sink
        self._console = make_console(quiet=not enabled, file=cast(TextIO, stdout))
        # A bar only on a terminal: in a file it would be thousands of lines.
        bar = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self._progress = Progress(*bar, console=self._console, transient=True, disable=not (enabled and self._console.is_terminal))
        self._task = self._progress.add_task("steps", total=None)

    def say(self, text: str) -> None:
        """Prints a line. Brackets in it are text, not markup."""
        # Soft wrap: a long line stays one line, which can be copied and searched.
        self._console.print(Text(text), soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[list[str]], numbers: int) -> None:
        """Prints a table whose last `numbers` columns are aligned to the right."""
        table = make_table(title, columns, len(columns) - numbers)
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def setup(self, setup: Setup) -> None:
        """Prints the mesh, the attention kernel, the pipeline, and each parameter with its spec and its bytes per device."""
        self.say(describe_mesh(setup))
        if kernels := describe_kernels(setup):
            self.say(kernels)
        if setup.run.pipeline is not None:
            self.say(describe_pipeline(setup.run.pipeline, setup.mesh.shape[setup.run.pipeline.axis]))
        rows = [
            [p.path, ", ".join(p.signals) or "(none)", "x".join(map(str, p.shape)), p.spec, size_text(p.bytes_per_device(setup.mesh))]
            for p in setup.placement.parameters
        ]
        # Without the optimizer's state, which has its own shapes; the dry run shows it.
        total = sum(p.bytes_per_device(setup.mesh) for p in setup.placement.parameters)
        rows.append([f"{setup.num_parameters:,} parameters", "", "", "", size_text(total)])
        self.table("Parameters", ["name", "signal", "shape", "spec", "bytes/device"], rows, numbers=1)

    def start_steps(self, done: int, total: int) -> None:
        """Shows the progress bar, at `done` of `total` steps."""
        self._progress.update(self._task, completed=done, total=total)
        self._progress.start()

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Prints a logged step and advances the bar. Metrics that are None or absent are left out."""
        self._progress.update(self._task, completed=step)
        self.say(
            f"step {step:>{len(str(total))}}/{total}  "
            + "  ".join(_metric_text(name, metrics[name]) for name in _METRICS_IN_LINE if metrics.get(name) is not None)
        )

    def stop_steps(self) -> None:
        """Removes the bar."""
        self._progress.stop()


_METRICS_IN_LINE = ("loss", "eval_loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu")


def _metric_text(name: str, value: Any) -> str:
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
    """A line with the pipeline's schedule, its bubble, and its peak of activations.

    The bubble assumes that forward pass, backward pass for the activations, and backward pass for the weights cost the same.
    """
    table = find_table(pipeline.schedule, num_stages, pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    simulation = simulate(table)
    return (
        f"Pipeline: {table.name} over {pipeline.axis} {num_stages}, {table.num_microbatches} microbatches: "
        f"bubble {simulation.bubble:.1%}, at most {simulation.peak:g} activations of a stage in memory at once"
    )


def describe_kernels(setup: Setup) -> str:
    """A line with the attention kernel and the reason for it, and the number of chunks of the loss."""
    chunks = "" if setup.loss_chunks == 1 else f"; loss in {setup.loss_chunks} chunks of the sequence"
    return f"Attention: {setup.attention.text}{chunks}" if setup.attention is not None else ""


def describe_mesh(setup: Setup) -> str:
    """A line with the mesh: its axes, devices and processes."""
    axes = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items())
    if not isinstance(setup.mesh, Mesh):
        return f"Mesh: {axes} = {setup.mesh.size} devices, none of them used here"
    devices = setup.mesh.devices
    kinds = ", ".join(sorted({d.device_kind for d in devices.flat}))
    # Processes of the mesh, not of the run: a mesh without rules has one device.
    hosts = len({d.process_index for d in devices.flat})
    processes = f" on {hosts} processes" if hosts > 1 else ""
    unsharded = "" if setup.run.rules is not None else " (no rules: the model runs unsharded on one device)"
    return f"Mesh: {axes} = {devices.size} x {kinds}{processes}{unsharded}"
