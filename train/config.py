"""One YAML file is one run: its sections, and what is wrong with them, without JAX."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from jgt import document
from jgt.document import Bound, InputError, Node, bind, collect
from jgt.mesh.sizes import MAX_DEVICES, read_sizes, size_problem
from jgt.pipeline.config import Pipeline
from jgt.pipeline.custom import find_table
from jgt.plan.limits import Limit, read_budget
from jgt.problems import misfit_problem
from jgt.rules import Matcher, Rules, expand, misfits, rules_from_node
from train.data.config import DataConfig, path_problems
from train.models.config import ModelConfig

Count = Annotated[int, Bound(low=1, high=1_000_000_000)]
Natural = Annotated[int, Bound(low=0, high=1_000_000_000)]
Batch = Annotated[int, Bound(low=1, high=1_000_000)]
Positive = Annotated[float, Bound(above=0, high=1e30)]
Seconds = Annotated[float, Bound(above=0, high=1_000_000)]
MAX_FLAGS = 64
MAX_NAME, MAX_PATH = 240, 2_000
"""Bytes of a run directory's path; a system's own limits are 255 and 4096."""
NotNegative = Annotated[float, Bound(low=0, high=1e30)]
Fraction = Annotated[float, Bound(low=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The `run:` section. dir defaults to runs/NAME."""

    name: str = "run"
    dir: str | None = None
    # JAX keeps 32 bits of a seed.
    seed: Annotated[int, Bound(low=0, high=2**32 - 1)] = 0

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.dir or f"runs/{self.name}")

    def problems(self) -> Iterator[tuple[str, str]]:
        """A name is one folder's name, and what is written below the directory has to have a name too."""
        if not self.name.isprintable() or set(self.name) & set("/\\") or self.name in ("", ".", ".."):
            yield "name", f"{document.shown(self.name)} cannot name a folder. Use letters, digits, dots and dashes"
        key = "name" if self.dir is None else "dir"
        if self.dir is not None and not (self.dir and self.dir.isprintable()):
            yield "dir", f"{document.shown(self.dir)} cannot be a path. Use letters, digits, dots, dashes and slashes, or null"
        elif max(map(len, map(os.fsencode, self.path.parts)), default=0) > MAX_NAME or len(os.fsencode(self.path)) > MAX_PATH:
            yield key, f"{document.shown(str(self.path))} is too long; a name has at most {MAX_NAME} bytes here, a path {MAX_PATH:,}"


@dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """The `devices:` section: absent, all that JAX finds; or this many virtual CPU devices a process."""

    virtual_cpu: Annotated[int, Bound(low=1, high=MAX_DEVICES)] | None = None


@dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """The `xla:` section. preset: a set of XLA flags; auto: gpu-overlap where there are NVIDIA GPUs; flags: more of them, by name.

    cache: the folder of compiled programs; auto: in the user's cache folder; null: none are kept.
    """

    preset: Literal["auto", "none", "gpu-overlap"] = "auto"
    flags: dict[str, bool | int | float | str] = field(default_factory=dict)
    cache: str | None = "auto"

    def plain_flags(self) -> dict[str, str]:
        """The flags as XLA reads them, without dashes."""
        return {name.removeprefix("--"): str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.flags.items()}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Names that can be XLA's, of which none leads to a place: there XLA would write, or run what it finds."""
        for name, value in self.flags.items():
            if not re.fullmatch(r"(--)?xla_\w{1,100}", name, re.ASCII) or not re.fullmatch(r"[\w.,:+-]{1,100}", str(value), re.ASCII):
                yield f"flags.{name}", "is no flag of XLA. Write xla_NAME: VALUE, without spaces and slashes"
            elif re.search(r"dump|_(dir|file|path|to|from|cache)(_|$)", name):
                yield f"flags.{name}", "names a place. Set it in the environment: XLA_FLAGS"
        if len(self.flags) > MAX_FLAGS:
            yield "flags", f"has {len(self.flags):,} flags; {MAX_FLAGS} are the most"
        if self.cache is not None and not (self.cache and self.cache.isprintable()):
            yield "cache", f"{document.shown(self.cache)} cannot be a path. Write auto, null, or the path of a folder"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The `optimizer:` section: AdamW (arXiv 1711.05101) with warm-up, then a schedule over the run's steps.

    cosine falls to final_lr x lr by the end of the run; wsd stays and falls linearly over the last `decay` share of the
    steps (arXiv 2404.06395); constant stays. Weight decay spares norms and biases. clip: the largest global norm of
    the gradient, or null.
    """

    name: Literal["adamw"] = "adamw"
    lr: Positive = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Natural = 0
    decay: Fraction = 0.2
    final_lr: Fraction = 0.1
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: Positive | None = 1.0


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """`train.skip_spikes`: skips an update whose loss lies so many standard deviations above the mean of the last `window` losses."""

    window: Annotated[int, Bound(low=4, high=1_000_000)] = 128
    deviations: Positive = 6.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The `train:` section. batch is global, in sequences; accumulate splits it into that many parts, one after another.

    remat: none, full (each layer recomputed from its input), or a list of tensor names to keep. eval_every: 0 evaluates at
    the end only. eval_batches bounds an evaluation; null goes over the whole held-out split. on_nonfinite: what follows an update
    whose loss or gradient is not finite, which is never applied: the run stops, or goes on. skip_spikes skips updates with
    extreme losses too. max_skipped in a row end the run.
    """

    steps: Count = 100
    batch: Batch = 32
    accumulate: Batch = 1
    remat: Literal["none", "full"] | tuple[str, ...] = "none"
    log_every: Count = 1
    eval_every: Natural = 0
    eval_batches: Count | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    skip_spikes: SpikesConfig | None = None
    max_skipped: Count = 10

    def problems(self) -> Iterator[tuple[str, str]]:
        """Parts of equal size."""
        if self.batch % self.accumulate:
            fits = ", ".join(str(n) for n in range(1, self.batch + 1) if self.batch % n == 0)
            yield "accumulate", f"batch {self.batch} is not divisible by accumulate {self.accumulate}. These divide it: {fits}"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The `checkpoint:` section: every so many steps (0: only at the end), and how many are kept.

    Files have a CRC-32 each; sha256 adds a SHA-256, which costs ten times as much. weights: another run's directory, or one of its
    checkpoints, whose parameters a new run starts with. cast: floating arrays of another type are converted when they are read.
    """

    every: Natural = 0
    keep: Count = 3
    sha256: bool = False
    weights: str | None = None
    cast: bool = False


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """The `watchdog:` section: after how many seconds a process that makes no progress is ended, and says where it was.

    step_seconds: in a step, or ten times the slowest step so far, if that is longer; start_seconds: in anything else;
    peer_seconds: without a word from another process of the run.
    """

    step_seconds: Seconds = 60.0
    start_seconds: Seconds = 1800.0
    peer_seconds: Seconds = 30.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault that a drill injects, once in a run, before a step begins or into the first save from it on."""

    at_step: Count
    kind: Literal["kill", "hang", "raise", "nan", "corrupt", "disk_full"]
    process: Natural = 0


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The `debug:` section: faults for drills."""

    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `sample:` section: text generated when training ends. tokens 0: none."""

    tokens: Natural = 0
    prompt: str = "\n"
    temperature: NotNegative = 0.8


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
    """Batch and sequence against the axes that the rules give the inputs, on a mesh of these sizes."""
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
