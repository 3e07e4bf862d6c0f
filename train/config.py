"""A run's YAML file: read, completed with overrides and defaults, and checked as a whole. Imports no JAX.

One file describes one run. `load` reads it, applies the `key.sub=value` overrides of the command line, fills the sections
(`sections.py`), and checks what one section alone cannot know: the mesh against the devices, the rules against the axes of
the mesh, the pipeline's schedule against its stages, the batch against the axes that split it. None of this needs JAX, so a
typo is answered in well under a second, and on a machine without accelerators.

All problems are reported together, so that a user fixes them in one pass. That takes care: after a problem the check
continues with everything that could be read, and a section that could not be read must not cause further messages that only
follow from its defaults (see `_readable_sections` and the end of `_check`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError, Node, bind, collect
from jgt.mesh.sizes import read_sizes, size_problem
from jgt.pipeline.config import Pipeline
from jgt.planner.budget import Limit, read_budget
from jgt.rules import Rules, expand, match_input, misfits, rules_from_node
from jgt.rules.spec import SpecRule, misfit_problem
from jgt.schedule.find import find_table

from .data.config import DataConfig, path_problems
from .models.config import ModelConfig
from .sections import (
    CheckpointConfig,
    DebugConfig,
    DevicesConfig,
    LoggerName,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    WatchdogConfig,
    XlaConfig,
    logger_problem,
    missing_loggers,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a run. The `Node` fields are parts of the document that other rooms read: mesh, rules and budget.

    log: where metrics go beside metrics.jsonl. null: TensorBoard's files if tensorboardX is installed.
    """

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    xla: XlaConfig = field(default_factory=XlaConfig)
    mesh: Node | None = None
    rules: Node | None = None
    pipeline: Pipeline | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: tuple[LoggerName, ...] | None = None
    debug: DebugConfig = field(default_factory=DebugConfig)
    budget: Node | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run: its config, the sizes of its mesh, its rules, pipeline and budget, and the documents they were read from.

    mesh: axis names and sizes, outermost first, where one size may be -1. root: the run's document; rules_root: the document of the
    rules, which may be another file.
    """

    config: Config
    mesh: dict[str, int]
    rules: Rules | None
    pipeline: Pipeline | None
    budget: tuple[Limit, ...]
    root: Node
    rules_root: Node | None

    @property
    def batch_rule(self) -> SpecRule | None:
        """The rule that lays out the arrays of a batch, [batch, seq]; None if they are not sharded."""
        return None if self.rules is None else match_input(self.rules, "inputs", 2).rule

    @property
    def batch_dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes that split the batch, and those that split the sequence."""
        batch, sequence = ((), ()) if self.batch_rule is None else expand(self.batch_rule.spec, 2)
        return batch, sequence

    def where(self, key: str) -> str:
        """The file:line of a dotted key, or of the nearest key around it that the file contains."""
        return self.root.find(key).where

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included and the rules inline: the `config.yaml` of the run directory."""
        # These are not sections: `log` is a list, and the others are read by other rooms, and their resolved values are on the Run.
        separate = ("mesh", "rules", "pipeline", "budget", "log")
        sections = {k: _lists(asdict(getattr(self.config, k))) for k in Config.__dataclass_fields__ if k not in separate}
        pipeline = None if self.pipeline is None else {f.name: getattr(self.pipeline, f.name) for f in fields(self.pipeline) if f.init}
        rules = None if self.rules_root is None else self.rules_root.plain()
        budget = None if self.config.budget is None else self.config.budget.plain()
        log = None if self.config.log is None else list(self.config.log)
        return {**sections, "log": log, "mesh": self.mesh, "rules": rules, "pipeline": pipeline, "budget": budget}


def _lists(value: Any) -> Any:
    """The value with lists in the place of tuples, as YAML has them."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple | list) else value


def load(path: str | Path, overrides: Sequence[str] = (), *, num_processes: int | None = 1, problems: Sequence[str] = ()) -> Run:
    """Reads and checks a run's file with `key.sub=value` overrides. Raises InputError with every problem.

    num_processes: the number of processes that share the mesh; None if a cluster decides it later. problems: messages of earlier checks,
    which are reported together with the messages about the file. A valid file may still have a batch that the mesh does not
    divide: `batch_problems` checks that, so that it is reported together with the parameters that the mesh does not divide.
    """
    found = list(problems)
    root = Node({}, str(path))
    with collect(found):
        root = document.read(path)
    is_readable = len(found) == len(problems)
    for assignment in overrides:
        with collect(found):
            root = document.override(root, assignment)
    # Without a document there is nothing to check; the overrides were still read for their own problems.
    if not is_readable:
        raise InputError(found)
    return _check(root, Path(path).parent, found, num_processes)


def batch_problems(run: Run, mesh: Mapping[str, int]) -> Iterator[str]:
    """Messages if the mesh axes that the rules assign to the inputs do not divide batch and sequence, or the loss's chunks the sequence.

    mesh: axis sizes, all of them known; axes that are missing are not checked.
    """
    # With null, the trainer chooses a divisor.
    chunks, seq = run.config.train.loss_chunks, run.config.model.seq
    if chunks is not None and seq % chunks:
        # Divisors up to 1000 only, which keeps the message short.
        fits = ", ".join(str(n) for n in range(1, min(seq, 1000) + 1) if seq % n == 0)
        yield f"{run.where('train.loss_chunks')}: train.loss_chunks: {chunks} does not divide model.seq {seq}. These do: {fits}"
    rule = run.batch_rule
    if rule is None:
        return
    train = run.config.train
    shape = (train.batch // train.accumulate, run.config.model.seq)
    what = f"input batch / accumulate {train.accumulate}" if train.accumulate > 1 else "input batch"
    for misfit in misfits(run.batch_dims, shape, mesh):
        key = ("train.batch", "model.seq")[misfit.dim]
        yield f"{run.where(key)}: {key}: {misfit_problem(rule, misfit, shape, mesh, what, label='inputs')}"


def _check(root: Node, folder: Path, problems: list[str], num_processes: int | None) -> Run:
    # `bind` returns None if any section is wrong.
    bound: Config | None = bind(root, Config, problems)
    config = bound or _readable_sections(root)
    mesh = {} if config.mesh is None else read_sizes(config.mesh, problems)
    rules_root = _rules_root(config.rules, folder, problems)
    rules = None
    if rules_root is not None:
        with collect(problems):
            rules = rules_from_node(rules_root)
    problems += [root.find("log").problem(logger_problem(name)) for name in missing_loggers(config.log or ())]
    data = root.find("data")
    problems += [data.find(name).problem(message) for name, message in path_problems(config.data)]
    # An empty mesh had problems of its own, or is absent.
    if mesh and config.mesh is not None:
        problems += _mesh_problems(config, config.mesh, mesh, num_processes)
    if rules is not None and config.mesh is None:
        problems.append(root.find("rules").problem("rules need a mesh: section with the axes that they name, for example mesh: {data: -1}"))
    if rules is not None and mesh:
        problems += rules.axis_problems(mesh)
    pipeline = None
    if config.pipeline is not None:
        pipeline = _with_locations(config.pipeline, root.find("pipeline"), folder)
        problems += _pipeline_problems(pipeline, root, mesh, rules_root is not None)
    budget = () if config.budget is None else read_budget(config.budget, problems)
    # The mesh is a placeholder if there is none: rules without a mesh are an error, and a run without rules is on one device.
    run = Run(config=config, mesh=mesh or {"data": -1}, rules=rules, pipeline=pipeline, budget=budget, root=root, rules_root=rules_root)
    if problems:
        # A size of -1 depends on the number of devices, and divides nothing yet.
        sizes = {axis: size for axis, size in mesh.items() if size != -1}
        # If a section could not be read, only its defaults are known, and its batch would be judged by numbers that nobody wrote.
        raise InputError(problems if bound is None else [*problems, *batch_problems(run, sizes)])
    return run


def _readable_sections(root: Node) -> Config:
    """The sections that could be read, and defaults for the others, so that problems of both kinds are reported together."""
    values = {}
    for name, child in root.children.items():
        if name in ("mesh", "rules", "budget"):
            values[name] = child
        elif name == "pipeline":
            values[name] = None if child.value is None else bind(child, Pipeline, [])
        elif name == "log":
            continue
        elif name in Config.__dataclass_fields__:
            cls = type(getattr(Config(), name))
            bound = bind(child, cls, [])
            values[name] = cls() if bound is None else bound
    return Config(**values)


def _rules_root(node: Node | None, folder: Path, problems: list[str]) -> Node | None:
    """The mapping of the rules, which is inline or in a file of its own. None if there are no rules or they cannot be read."""
    if node is None or node.value is None:
        return None
    if isinstance(node.value, dict):
        return node
    if not isinstance(node.value, str):
        problems.append(node.problem(f"rules must be the path of a file or a mapping, not {document.describe(node.value)}"))
        return None
    # Beside the file, not in the working directory: a config and its rules move together.
    path = _beside(node, folder)
    if not document.is_file(path):
        candidates = []
        with contextlib.suppress(OSError, ValueError):
            candidates = sorted(file.name for file in path.parent.glob("*.yaml"))
        problems.append(node.problem(f"no such rules file: {path}. {document.nearest(path.name, candidates)}"))
        return None
    with collect(problems):
        return document.read(path)


def _beside(node: Node, folder: Path) -> Path:
    """A path relative to the folder of the file that contains its key. That file may be one that the run's file extends."""
    file = Path(node.where.rpartition(":")[0])
    return (file.parent if document.is_file(file) else folder) / str(node.value)


def _with_locations(pipeline: Pipeline, node: Node, folder: Path) -> Pipeline:
    """The pipeline with the line of each of its keys, for messages, and with the full path of its CSV schedule."""
    # The name of a schedule, or the path of a CSV file.
    if pipeline.schedule.endswith(".csv"):
        pipeline = replace(pipeline, schedule=str(_beside(node.find("schedule"), folder)))
    return pipeline.located({"": node.where} | {key: child.where for key, child in node.children.items()})


def _pipeline_problems(pipeline: Pipeline, root: Node, mesh: dict[str, int], has_rules: bool) -> Iterator[str]:
    if not has_rules:
        yield root.find("pipeline").problem("a pipeline needs rules: and a mesh: section with its axis")
    if mesh and pipeline.axis not in mesh:
        yield pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {document.nearest(pipeline.axis, mesh)}")
    num_stages = mesh.get(pipeline.axis, -1)
    problems: list[str] = []
    with collect(problems):
        find_table(
            pipeline.schedule, num_stages if num_stages > 0 else 1, pipeline.microbatches, pipeline.virtual, pipeline.where("schedule")
        )
    # While the number of stages is -1, a schedule is tried with one stage, to check its name. A CSV file has its own number and would fail.
    yield from problems if num_stages > 0 or not pipeline.schedule.endswith(".csv") else ()


def _mesh_problems(config: Config, node: Node, mesh: dict[str, int], num_processes: int | None) -> Iterator[str]:
    # Without virtual devices, only JAX knows how many there are.
    if config.devices.virtual_cpu is None or num_processes is None:
        return
    problem = size_problem(mesh, config.devices.virtual_cpu * num_processes)
    if problem:
        yield node.problem(problem)
