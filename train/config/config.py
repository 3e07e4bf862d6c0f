"""The config of a run: the sections of its YAML file, and with them what was read and checked around it. Imports no JAX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from jgt import PipelineConfig, Rules
from jgt.document import Node, path_problem
from jgt.planner import Budget

from ..checkpoint.config import CheckpointConfig
from ..data.config import DataConfig, OwnData
from ..models.config import ModelConfig, OwnModel
from ..processes.config import WatchdogConfig
from ..settings.code.files import Code
from ..settings.code.names import is_name
from ..settings.packages import LoggerName
from ..settings.sampling import EvalConfig, GenerateConfig, SampleConfig
from ..settings.sections import OTHER_WORDS, AlertsConfig, DebugConfig, DevicesConfig, HookConfig, MetricsConfig, RunConfig, XlaConfig
from ..settings.training import TrainConfig
from ..step.config import OptimizerConfig, OwnOptimizer
from ..step.sync.config import SyncConfig
from ..weights.adapt.config import LoraConfig

OWN = ("model.kind", "train.loss", "optimizer.name", "data.source", "data.transform")
"""The keys that may name code of the user's own."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a run. The `Node` fields are parts of the document that other rooms read: mesh, rules and budget.

    log: where metrics go beside metrics.jsonl. null: TensorBoard's files if tensorboardX is installed.
    hooks: code of the user's own that the run calls while it trains, by a name for it.
    """

    WORDS = OTHER_WORDS
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig | OwnModel = field(default_factory=ModelConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    xla: XlaConfig = field(default_factory=XlaConfig)
    mesh: Node | None = None
    rules: Node | None = None
    pipeline: PipelineConfig | None = None
    data: DataConfig | OwnData = field(default_factory=DataConfig)
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig | OwnOptimizer = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: tuple[LoggerName, ...] | None = None
    hooks: dict[str, HookConfig] = field(default_factory=dict[str, HookConfig])
    alerts: AlertsConfig | None = None
    metrics: MetricsConfig | None = None
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
        value = getattr(getattr(self.config, section), name, None)
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

    def is_from_file(self, key: str) -> bool:
        """Whether a file has chosen the value of a key, and not a person by the command line or by Python."""
        return not path_problem(self.root.find(key).file)

    def where(self, key: str) -> str:
        """The file:line of a dotted key, or of the nearest key around it that the file contains."""
        return self.root.find(key).where

    def resolved(self) -> dict[str, object]:
        """Every key with its value, defaults included and the rules inline: the `config.yaml` of the run directory."""
        # These are not sections: `log` is a list, and the others are read by other rooms, and their resolved values are on the Run.
        separate = {"sync": self.config.sync, "log": self.config.log, "mesh": self.mesh, "rules": self.rules_root}
        separate |= {"pipeline": self.pipeline, "budget": self.config.budget}
        sections = {name: getattr(self.config, name) for name in Config.__dataclass_fields__ if name not in separate}
        values = {name: _plain(value) for name, value in {**sections, **separate}.items()}
        if self.config.train.epochs is not None:
            values["train"]["steps"] = None
        if values["alerts"] is not None:
            # It may have a token, and what is stored here may be copied to others.
            values["alerts"]["command"] = []
        return values


def _plain(value: Any) -> Any:
    """A section or another part as the file has it: keys that a section only passes on are keys like all others."""
    if isinstance(value, Node):
        return value.plain()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: asdict(value)[field.name] for field in fields(value) if field.init}
        rest = values.pop(getattr(value, "REST", ""), {})
        value = {**values, **rest}
    # With lists in the place of tuples.
    return Node.of(value, "").plain()
