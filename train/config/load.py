"""Reads and checks a run's YAML file as a whole. Imports no JAX.

`load` reads the file, applies the `key.sub=value` overrides of the command line, fills the sections, and checks what one section alone
cannot know: the mesh against the devices, the rules against the axes of the mesh, the pipeline's schedule against its stages, and what
`problems.py` has. None of this needs JAX, so a typo is answered in well under a second, and on a machine without accelerators.

All problems are reported together, so that a user fixes them in one pass. That takes care: after a problem the check
continues with everything that could be read, and a section that could not be read must not cause further messages that only
follow from its defaults (see `_readable_sections` and the end of `_check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jgt import MeshSizes, PipelineConfig, Rules, document, make_rules
from jgt.document import InputError, Node, bind
from jgt.planner import Budget

from ..data.config import OwnData
from ..data.paths import path_problems
from ..settings.code.files import Code, read_code
from ..settings.code.names import object_name
from ..settings.packages import logger_problem, missing_loggers
from ..settings.sections import AlertsConfig, HookConfig, MetricsConfig
from ..step.sync.config import SyncConfig
from ..weights.adapt.config import LoraConfig
from ..weights.adapters import with_adapter
from ..weights.described import with_published
from .config import Config, Run
from .problems import batch_problems, run_problems

_DATA_AXES = ("replica", "data", "fsdp")
"""The axes that split a batch where no rules say it."""
_OPTIONAL = {"alerts": AlertsConfig, "metrics": MetricsConfig, "lora": LoraConfig, "pipeline": PipelineConfig, "sync": SyncConfig}
"""The sections that a run need not have."""


def load(
    path: str | Path | Mapping[str, object] | Node,
    overrides: Sequence[str] = (),
    *,
    code: Code | Sequence[str | Path] = (),
    num_processes: int | None = 1,
    problems: Sequence[str] = (),
    reads_data: bool = True,
) -> Run:
    """Reads and checks a run's file, or its contents as a mapping or a document. Raises InputError with every problem.

    overrides: `key.sub=value`. code: the user's own code that the file may name, or the paths of its files. num_processes: the number of
    processes that share the mesh; None if a cluster decides it later. problems: messages of earlier checks, which are reported beside
    the messages about the file. reads_data: whether the paths of the data are checked.
    Whether the mesh divides the batch is left to `batch_problems`, whose messages appear beside those about parameters.
    """
    code = code if isinstance(code, Code) else read_code(code)
    all_problems = list(problems)
    name = "config" if isinstance(path, Mapping | Node) else str(path)
    root = path if isinstance(path, Node) else Node({}, name)
    with InputError.collect(all_problems):
        if not isinstance(path, Node):
            root = Node.of(path, name) if isinstance(path, Mapping) else document.read(path)
    folder = Path() if isinstance(path, Mapping) else root.file.parent
    is_readable = len(all_problems) == len(problems)
    for assignment in overrides:
        with InputError.collect(all_problems):
            root = document.override(root, assignment)
    for key, part in code.objects.items():
        with InputError.collect(all_problems):
            root = document.override(root, f"{key}={object_name(part)}", "Python")
    with InputError.collect(all_problems):
        root = with_adapter(with_published(root))
    # Without a document there is nothing to check; the overrides were still read for their own problems.
    if not is_readable:
        raise InputError(all_problems)
    return _check(root, folder, all_problems, num_processes, code, reads_data=reads_data)


def _check(root: Node, folder: Path, problems: list[str], num_processes: int | None, code: Code, *, reads_data: bool) -> Run:
    # `bind` returns None if any section is wrong.
    bound: Config | None = bind(root, Config, problems)
    config = _without_nulls(bound or _readable_sections(root))
    num_before = len(problems)
    mesh = {"data": -1} if config.mesh is None else MeshSizes.read(config.mesh, problems)
    has_sizes = len(problems) == num_before
    rules_root, rules = _read_rules(config, root, mesh, folder, problems)
    problems += [root.find("log").problem(logger_problem(name)) for name in missing_loggers(config.log or ())]
    data = root.find("data")
    problems += [data.find(name).problem(message) for name, message in (path_problems(config.data) if reads_data else ())]
    if has_sizes and config.mesh is not None:
        problems += _mesh_problems(config, config.mesh, mesh, num_processes)
    pipeline = None
    if config.pipeline is not None:
        pipeline = _with_locations(config.pipeline, root.find("pipeline"), folder).reducing(config.optimizer.gradients or "f32")
        problems += _pipeline_problems(pipeline, root, mesh if config.mesh is not None else {}, config.rules is not None)
    budget = Budget() if config.budget is None else Budget.read(config.budget, problems)
    rules = rules.for_rows("plain" if isinstance(config.data, OwnData) else config.data.order)
    run = Run(config=config, mesh=mesh, rules=rules, pipeline=pipeline, budget=budget, root=root, rules_root=rules_root, code=code)
    problems += run_problems(run)
    if problems:
        # A size of -1 depends on the number of devices, and divides nothing yet.
        sizes = {axis: size for axis, size in mesh.items() if size != -1}
        # If a section could not be read, only its defaults are known, and its batch would be judged by numbers that are not in the file.
        raise InputError(problems if bound is None else [*problems, *batch_problems(run, sizes)])
    return run


def _without_nulls(config: Config) -> Config:
    """The config without the parts whose value is null, which an override may have set."""
    nulls = [name for name in ("mesh", "rules", "budget") if (node := getattr(config, name)) is not None and node.value is None]
    return replace(config, **dict.fromkeys(nulls))


def _read_rules(config: Config, root: Node, mesh: Mapping[str, int], folder: Path, problems: list[str]) -> tuple[Node | None, Rules]:
    """The document of the rules, if there is one, and the rules: without any, each device has the whole model and its rows of the batch."""
    if config.rules is None:
        # A pipeline without rules has another message, and `auto` chooses rules for the axes.
        problems += () if config.pipeline is not None or config.train.auto else _axes_that_need_rules(config.mesh, mesh)
        tree = {"axes": {"batch": [axis for axis in mesh if axis in _DATA_AXES]}, "default": "replicate"}
        return None, make_rules(Node.of(tree, "no rules, so data-parallel"))
    if config.mesh is None:
        problems.append(root.find("rules").problem("rules need a mesh: section with the axes that they name, for example mesh: {data: -1}"))
    rules_root, rules = rules_document(config.rules, folder, problems), Rules()
    if rules_root is not None:
        with InputError.collect(problems):
            rules = make_rules(rules_root)
            if mesh and config.mesh is not None:
                rules = rules.on(mesh)
                problems += rules.axis_problems(mesh)
    return rules_root, rules


def _axes_that_need_rules(node: Node | None, mesh: Mapping[str, int]) -> Iterator[str]:
    names = ", ".join(axis for axis, size in mesh.items() if size != 1 and axis not in _DATA_AXES)
    if names and node is not None:
        remedy = f"Add rules, for example rules: jgt:fsdp_tensor, or use {', '.join(_DATA_AXES[:-1])} or {_DATA_AXES[-1]}"
        yield node.problem(f"without rules a run is data-parallel, and does not use the axis {names}. {remedy}")


def _readable_sections(root: Node) -> Config:
    """The sections that could be read, and defaults for the others, so that problems of both kinds are reported together."""
    values = {}
    for name, child in root.children.items():
        if name in ("mesh", "rules", "budget"):
            values[name] = child
        elif name in _OPTIONAL:
            values[name] = None if child.value is None else bind(child, _OPTIONAL[name], [])
        elif name == "log":
            continue
        elif name == "hooks":
            values[name] = {key: hook for key, node in child.children.items() if (hook := bind(node, HookConfig, []))}
        elif name in Config.__dataclass_fields__:
            cls = type(getattr(Config(), name))
            bound = bind(child, cls, [])
            values[name] = cls() if bound is None else bound
    return Config(**values)


def rules_document(node: Node, folder: Path, problems: list[str]) -> Node | None:
    """The mapping of the rules, which is inline or in another file. None if it cannot be read."""
    if isinstance(node.value, dict):
        return node
    if not isinstance(node.value, str):
        problems.append(node.problem(f"rules must be the path of a file or a mapping, not {document.shown(node.plain())}"))
        return None
    with InputError.collect(problems):
        # Beside the file, not in the working directory: a config and its rules move together.
        return document.read(node.existing_file(folder, Rules.FOLDER))


def _with_locations(pipeline: PipelineConfig, node: Node, folder: Path) -> PipelineConfig:
    """The pipeline with the line of each of its keys, for messages, and with full paths of its CSV schedule and of a run with costs."""
    # The name of a schedule, or the path of a CSV file.
    if pipeline.schedule.endswith(".csv"):
        pipeline = replace(pipeline, schedule=str(node.find("schedule").path(folder)))
    if pipeline.costs is not None:
        pipeline = replace(pipeline, costs=str(node.find("costs").path(folder)))
    return pipeline.located({"": node.where} | {key: child.where for key, child in node.children.items()})


def _pipeline_problems(pipeline: PipelineConfig, root: Node, mesh: dict[str, int], has_rules: bool) -> Iterator[str]:
    if not has_rules:
        yield root.find("pipeline").problem("a pipeline needs rules: and a mesh: section with its axis")
    if mesh and pipeline.axis not in mesh:
        yield pipeline.problem("axis", f"the mesh has no axis {pipeline.axis!r}. {document.nearest(pipeline.axis, mesh)}")
    num_stages = mesh.get(pipeline.axis, -1)
    problems: list[str] = []
    with InputError.collect(problems):
        pipeline.table(num_stages if num_stages > 0 else 1)
    # While the number of stages is -1, a schedule is tried with one stage, to check its name. A CSV file has its own number and would fail.
    yield from problems if num_stages > 0 or not pipeline.schedule.endswith(".csv") else ()


def _mesh_problems(config: Config, node: Node, mesh: dict[str, int], num_processes: int | None) -> Iterator[str]:
    # Without virtual devices, only JAX knows how many there are.
    is_alone = config.rules is None and all(size == 1 for size in mesh.values())
    if config.devices.virtual_cpu is None or num_processes is None or is_alone:
        return
    problem = MeshSizes(mesh).problem(config.devices.virtual_cpu * num_processes)
    if problem:
        yield node.problem(problem)
