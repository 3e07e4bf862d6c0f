"""One YAML file is one run: its sections together, and what is wrong with them, without JAX."""

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
from jgt.pipeline.custom import find_table
from jgt.plan.limits import Limit, read_budget
from jgt.problems import misfit_problem
from jgt.rules import Matcher, Rules, expand, misfits, rules_from_node
from train.data.config import DataConfig, path_problems
from train.models.config import ModelConfig
from train.sections import (
    CheckpointConfig,
    DebugConfig,
    DevicesConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
    WatchdogConfig,
    XlaConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a run."""

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
    debug: DebugConfig = field(default_factory=DebugConfig)
    budget: Node | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run: its config, mesh sizes, rules and budget, and the documents they were read from."""

    config: Config
    mesh: dict[str, int]
    rules: Rules | None
    pipeline: Pipeline | None
    budget: tuple[Limit, ...]
    root: Node
    rules_root: Node | None

    def where(self, key: str) -> str:
        """The file:line of a key, or of what stands around it."""
        return self.root.find(key).where

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, defaults included and the rules inline, as the run directory keeps it."""
        own = ("mesh", "rules", "pipeline", "budget")
        sections = {k: _lists(asdict(getattr(self.config, k))) for k in Config.__dataclass_fields__ if k not in own}
        pipeline = None if self.pipeline is None else {f.name: getattr(self.pipeline, f.name) for f in fields(self.pipeline) if f.init}
        rules = None if self.rules_root is None else self.rules_root.plain()
        budget = None if self.config.budget is None else self.config.budget.plain()
        return {**sections, "mesh": self.mesh, "rules": rules, "pipeline": pipeline, "budget": budget}


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple | list) else value


def load(path: str | Path, overrides: Sequence[str] = (), *, num_processes: int | None = 1, problems: Sequence[str] = ()) -> Run:
    """Reads and checks a run's file with `key.sub=value` overrides. Raises InputError with every problem.

    num_processes: how many share the mesh; None when a cluster will tell. `problems` found before are reported with the
    file's. Whether mesh and rules divide the batch is left to `batch_problems`, to be reported with the parameters.
    """
    found = list(problems)
    root = Node({}, str(path))
    with collect(found):
        root = document.read(path)
    readable = len(found) == len(problems)
    for assignment in overrides:
        with collect(found):
            root = document.override(root, assignment)
    if not readable:
        raise InputError(found)
    return _check(root, Path(path).parent, found, num_processes)


def batch_problems(run: Run, mesh: Mapping[str, int]) -> Iterator[str]:
    """Batch and sequence against the axes that the rules give the inputs, on a mesh of these sizes, and against the loss's chunks."""
    chunks, seq = run.config.train.loss_chunks, run.config.model.seq
    if chunks is not None and seq % chunks:
        fits = ", ".join(str(n) for n in range(1, min(seq, 1000) + 1) if seq % n == 0)
        yield f"{run.where('train.loss_chunks')}: train.loss_chunks: {chunks} does not divide model.seq {seq}. These do: {fits}"
    rule = None if run.rules is None else Matcher(run.rules).input("inputs", 2)
    if rule is None:
        return
    train = run.config.train
    shape = (train.batch // train.accumulate, run.config.model.seq)
    what = f"input batch / accumulate {train.accumulate}" if train.accumulate > 1 else "input batch"
    for misfit in misfits(expand(rule.spec, 2), shape, mesh):
        key = ("train.batch", "model.seq")[misfit.dim]
        yield f"{run.where(key)}: {key}: {misfit_problem(rule, misfit, shape, mesh, what, label='inputs')}"


def _check(root: Node, folder: Path, problems: list[str], num_processes: int | None) -> Run:
    bound: Config | None = bind(root, Config, problems)
    config = bound or _partly(root)
    mesh = {} if config.mesh is None else read_sizes(config.mesh, problems)
    rules_root = _rules_root(config.rules, folder, problems)
    rules = None
    if rules_root is not None:
        with collect(problems):
            rules = rules_from_node(rules_root)
    data = root.find("data")
    problems += [data.find(name).problem(message) for name, message in path_problems(config.data)]
    if mesh and config.mesh is not None:
        problems += _mesh_problems(config, config.mesh, mesh, num_processes)
    if rules is not None and config.mesh is None:
        problems.append(root.find("rules").problem("rules need a mesh: section with the axes that they name, for example mesh: {data: -1}"))
    if rules is not None and mesh:
        problems += rules.axis_problems(mesh)
    pipeline = None
    if config.pipeline is not None:
        pipeline = _located(config.pipeline, root.find("pipeline"), folder)
        problems += _pipeline_problems(pipeline, root, mesh, rules_root is not None)
    budget = () if config.budget is None else read_budget(config.budget, problems)
    run = Run(config=config, mesh=mesh or {"data": -1}, rules=rules, pipeline=pipeline, budget=budget, root=root, rules_root=rules_root)
    if problems:
        sizes = {axis: size for axis, size in mesh.items() if size != -1}
        # Of a section that could not be read only defaults are known: nothing to judge.
        raise InputError(problems if bound is None else [*problems, *batch_problems(run, sizes)])
    return run


def _partly(root: Node) -> Config:
    """The sections that could be read, so that the others' problems are reported with theirs."""
    values = {}
    for name, child in root.value.items():
        if name in ("mesh", "rules", "budget"):
            values[name] = child
        elif name == "pipeline":
            values[name] = None if child.value is None else bind(child, Pipeline, [])
        elif name in Config.__dataclass_fields__:
            cls = type(getattr(Config(), name))
            bound = bind(child, cls, [])
            values[name] = cls() if bound is None else bound
    return Config(**values)


def _rules_root(node: Node | None, folder: Path, problems: list[str]) -> Node | None:
    """The mapping that holds the rules: inline, or that of a file."""
    if node is None or node.value is None:
        return None
    if isinstance(node.value, dict):
        return node
    if not isinstance(node.value, str):
        problems.append(node.problem(f"rules are the path of a file or a mapping, not {document.describe(node.value)}"))
        return None
    path = _beside(node, folder)
    if not document.is_file(path):
        beside = []
        with contextlib.suppress(OSError, ValueError):
            beside = sorted(file.name for file in path.parent.glob("*.yaml"))
        problems.append(node.problem(f"no such rules file: {path}. {document.nearest(path.name, beside)}"))
        return None
    with collect(problems):
        return document.read(path)


def _beside(node: Node, folder: Path) -> Path:
    """A path beside the file that its key stands in, which may be one that the run's file extends."""
    file = Path(node.where.rpartition(":")[0])
    return (file.parent if document.is_file(file) else folder) / node.value


def _located(pipeline: Pipeline, node: Node, folder: Path) -> Pipeline:
    """The pipeline with the lines of its keys and the path of its table."""
    if pipeline.schedule.endswith(".csv"):
        pipeline = replace(pipeline, schedule=str(_beside(node.find("schedule"), folder)))
    return pipeline.located({"": node.where} | {key: child.where for key, child in node.value.items()})


def _pipeline_problems(pipeline: Pipeline, root: Node, mesh: dict[str, int], has_rules: bool) -> Iterator[str]:
    if not has_rules:
        yield root.find("pipeline").problem("a pipeline needs rules: and a mesh: section with its axis")
    if mesh and pipeline.axis not in mesh:
        yield pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {document.nearest(pipeline.axis, mesh)}")
    num_stages = mesh.get(pipeline.axis, -1)
    found: list[str] = []
    with collect(found):
        find_table(pipeline.schedule, num_stages if num_stages > 0 else 1, pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    # Of a table whose stages are not known yet only its name can be judged.
    yield from found if num_stages > 0 or not pipeline.schedule.endswith(".csv") else ()


def _mesh_problems(config: Config, node: Node, mesh: dict[str, int], num_processes: int | None) -> Iterator[str]:
    if config.devices.virtual_cpu is None or num_processes is None:
        return
    problem = size_problem(mesh, config.devices.virtual_cpu * num_processes)
    if problem:
        yield node.problem(problem)
