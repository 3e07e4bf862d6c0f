"""Runs from Python: `jgt.run` trains as the command does.

    result = jgt.run("run.yaml", ["optimizer.lr=3e-4"], model=Mamba, loss=loss)

Parts of a run may be given as objects instead of names: the config then says `python:Mamba` in their place. Wrong input raises InputError,
and a run that cannot continue raises the error whose message the command prints. Ctrl-C stops after the current step and saves, so `run`
returns then too. A second one raises KeyboardInterrupt at once, and so does one before the first step: the process is never ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jgt.document import InputError, shown

from .. import config as configs
from ..checkpoint.signature import read_key
from ..config import Run
from ..journal.rows import read_metrics
from ..processes.compiled import programs_on_trial
from ..processes.connect import start_jax
from ..settings.code.files import Code, read_code
from ..settings.code.names import exits_are_failures
from ..setup import Setup
from ..setup.xla import configure_xla, open_devices
from ..step.state import State
from .directory.identity import check_places, read_resume
from .start import Position
from .train import train

_PARTS = {
    "model.kind": ("model", "the class of a module or a function that makes one"),
    "train.loss": ("loss", "a function loss(model, batch)"),
    "optimizer.name": (
        "optimizer",
        "a function that makes an optax transformation, such as lambda learning_rate: optax.sgd(learning_rate)",
    ),
    "data.source": ("data", "a function"),
    "data.transform": ("transform", "a function transform(sample, rng)"),
}
"""The argument of each key, and what it may be."""
_FOREVER = 1_000_000.0
"""Seconds. A notebook may be suspended, and its process is not the run's to end."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run that has ended or was stopped. metrics: the rows of metrics.jsonl. is_done: whether it has ended; False after Ctrl-C."""

    folder: Path
    position: Position
    setup: Setup
    metrics: list[dict[str, Any]]
    is_done: bool

    @property
    def step(self) -> int:
        """The updates so far."""
        return self.position.step

    @property
    def state(self) -> State:
        """The parameters, the optimizer's state, and what the model keeps beside its parameters."""
        return self.position.state

    @property
    def model(self) -> Any:
        """The trained module, as it is evaluated."""
        params = self.setup.model_params(self.setup.last_params(self.state))
        return self.setup.program.model.module(params, self.setup.eval_variables(self.state))


@exits_are_failures()
def run_here(
    config: str | Path | Mapping[str, object],
    overrides: str | Sequence[str] = (),
    *,
    model: Callable[..., object] | None = None,
    loss: Callable[..., object] | None = None,
    optimizer: Callable[..., object] | None = None,
    data: object = None,
    transform: Callable[..., object] | None = None,
    hooks: Mapping[str, Callable[..., object]] | None = None,
    code: str | Path | Sequence[str | Path] = (),
    resume: str = "auto",
    allow_change: Sequence[str] = (),
    allow_command: bool = False,
    **others: object,
) -> RunResult:
    """Trains a run in this process, to its end or until Ctrl-C, and returns its state.

    config: a file, or its contents as a mapping; overrides: as on the command line. model: the class of a module or a function that makes
    one, called with the keys of `model:`. loss, optimizer: functions. data: a function, called with the keys of `data:`, or samples, or a
    pair of training and held-out samples. transform: a function of a training sample and a generator of random numbers. hooks: functions or
    classes by the names of their entries in `hooks:`. code, resume, allow_change, allow_command: as the options of the command.
    """
    if others:
        raise TypeError(f"jgt.run has no argument {next(iter(others))!r}. Values of the config are overrides, such as ['train.steps=3']")
    if isinstance(overrides, Mapping):
        raise TypeError("overrides are texts, such as ['train.steps=3'], not a mapping")
    parts = {"model.kind": model, "train.loss": loss, "optimizer.name": optimizer, "data.source": data, "data.transform": transform}
    own = own_code(code, parts | {f"hooks.{name}.call": hook for name, hook in (hooks or {}).items()})
    checked = configs.load(config, listed(overrides), code=own)
    watched = replace(checked.config.watchdog, step_seconds=_FOREVER, start_seconds=_FOREVER)
    checked = replace(checked, config=replace(checked.config, watchdog=watched))
    given = read_resume(resume, allow_change, checked.config.run.checkpoints)
    check_places(checked, given, allow_command=allow_command)
    read_key(checked.config.checkpoint.key)
    ends: list[tuple[Setup, Position, bool]] = []
    with programs_on_trial():
        start_jax_here(checked)
        train(checked, given, on_end=lambda *end: ends.append(end), owns_process=False)
    (setup, position, is_done), folder, metrics = ends[0], checked.config.run.path, list[dict[str, Any]]()
    # Whatever has become of the file, the state is the caller's.
    with contextlib.suppress(OSError):
        metrics += read_metrics(folder / "metrics.jsonl")
    return RunResult(folder=folder, position=position, setup=setup, metrics=metrics, is_done=is_done)


def start_jax_here(checked: Run) -> None:
    """Starts JAX as the config says, unless this process has used it already."""
    config = checked.config
    with contextlib.suppress(RuntimeError):
        configure_xla(config, is_from_file=checked.is_from_file("xla.cache"))
        start_jax(None, config.devices.virtual_cpu, where=checked.where("devices.virtual_cpu"))
    open_devices()
    wanted = config.devices.virtual_cpu
    if wanted is not None and len(jax.devices()) != wanted:
        why = f"devices.virtual_cpu: is {wanted}, but JAX has already started with {len(jax.devices())} devices. Begin in a new process"
        raise InputError([f"{checked.where('devices.virtual_cpu')}: {why}"])


def own_code(paths: str | Path | Sequence[str | Path], objects: Mapping[str, object]) -> Code:
    """The user's own code: files, and objects by the key that they stand for."""
    read = read_code(listed(paths))
    return replace(read, objects={key: _callable(key, part) for key, part in objects.items() if part is not None})


def _callable(key: str, part: object) -> Callable[..., object]:
    if key == "data.source" and not callable(part):
        return lambda: part
    name, of = _PARTS.get(key, (key, "a function of the moment, or a class of such functions"))
    if isinstance(part, nnx.Module):
        raise TypeError(f"{name} must be {of}, not a {type(part).__name__} that is made already")
    if not callable(part):
        raise TypeError(f"{name} must be {of}, not {shown(part)}")
    return part


def listed(values: str | Path | Sequence[Any]) -> Sequence[Any]:
    return [values] if isinstance(values, str | Path) else values
