"""The config of a run: the sections of its YAML file, and with them what was read and checked around it. Imports no JAX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jgt import Rules
from jgt.document import Node
from jgt.pipeline.config import PipelineConfig
from jgt.planner import Budget

from ..code.files import Code
from ..code.names import is_name
from ..data.config import DataConfig, OwnData
from ..models.config import ModelConfig, OwnModel
from ..sections import (
    CheckpointConfig,
    DebugConfig,
    DevicesConfig,
    LoggerName,
    RunConfig,
    SampleConfig,
    TrainConfig,
    WatchdogConfig,
    XlaConfig,
)
from ..step.config import OptimizerConfig, OwnOptimizer
from ..sync.config import SyncConfig

OWN = ("model.kind", "train.loss", "optimizer.name", "data.source")
"""The keys that may name code of the user's own."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a run. The `Node` fields are parts of the document that other rooms read: mesh, rules and budget.

    log: where metrics go beside metrics.jsonl. null: TensorBoard's files if tensorboardX is installed.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig | OwnModel = field(default_factory=ModelConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    xla: XlaConfig = field(default_factory=XlaConfig)
    mesh: Node | None = None
    rules: Node | None = None
    pipeline: PipelineConfig | None = None
    data: DataConfig | OwnData = field(default_factory=DataConfig)
    optimizer: OptimizerConfig | OwnOptimizer = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: tuple[LoggerName, ...] | None = None
    debug: DebugConfig = field(default_factory=DebugConfig)
    budget: Node | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run: its config, the sizes of its mesh, its rules, pipeline and budget, and the documents they were read from.

    mesh: axis names and sizes, outermost first, where one size may be -1. rules: data-parallel ones for a file without rules. root: the
    run's document; rules_root: the document of the rules, which may be another file; None without rules. code: the user's own code that the
    config may name. epoch_steps: the number of steps that `train.epochs` makes; None until the data is open.
    """

    config: Config
    mesh: dict[str, int]
    rules: Rules
    pipeline: PipelineConfig | None
    budget: Budget
    root: Node
    rules_root: Node | None
    code: Code = field(default_factory=Code)
    epoch_steps: int | None = None

    @property
    def steps(self) -> int:
        """The updates of the whole run. With `train.epochs` they are known once the data is open, and 1 until then."""
        if self.config.train.epochs is not None:
            return self.epoch_steps or 1
        assert self.config.train.steps is not None
        return self.config.train.steps

    def own(self, key: str) -> str | None:
        """The name of the user's own object that a key of `OWN` names; None if the trainer's own is meant."""
        section, _, name = key.partition(".")
        value = getattr(getattr(self.config, section), name)
        return value if is_name(value) else None

    @property
    def is_alone(self) -> bool:
        """Whether the run is on one device, however many there are: its mesh says so, and no rules name the axes."""
        return self.rules_root is None and all(size == 1 for size in self.mesh.values())

    @property
    def batch_dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes that split the batch, and those that split the sequence."""
        rule = self.rules.match_input("batch/inputs", 2).rule
        batch, sequence = ((), ()) if rule is None else rule.dims(2)
        return batch, sequence

    def where(self, key: str) -> str:
        """The file:line of a dotted key, or of the nearest key around it that the file contains."""
        return self.root.find(key).where

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included and the rules inline: the `config.yaml` of the run directory."""
        # These are not sections: `log` is a list, and the others are read by other rooms, and their resolved values are on the Run.
        separate = ("mesh", "rules", "pipeline", "sync", "budget", "log")
        sections = {k: _section(getattr(self.config, k)) for k in Config.__dataclass_fields__ if k not in separate}
        if self.config.train.epochs is not None:
            sections["train"]["steps"] = None
        pipeline = None if self.pipeline is None else {f.name: getattr(self.pipeline, f.name) for f in fields(self.pipeline) if f.init}
        rules = None if self.rules_root is None else self.rules_root.plain()
        sync = None if self.config.sync is None else _section(self.config.sync)
        budget = None if self.config.budget is None else self.config.budget.plain()
        log = None if self.config.log is None else list(self.config.log)
        return {**sections, "sync": sync, "log": log, "mesh": self.mesh, "rules": rules, "pipeline": pipeline, "budget": budget}


def _section(section: Any) -> Any:
    """A section as the file has it: keys that the section only passes on are keys like all others."""
    values = _lists(asdict(section))
    arguments = values.pop(section.REST) if hasattr(section, "REST") else {}
    return {**values, **arguments}


def _lists(value: Any) -> Any:
    """The value with lists in the place of tuples, as YAML has them."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple | list) else value
