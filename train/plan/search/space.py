"""The layouts that a search may try: every way to use the devices that the user's file leaves open.

    mesh: {tensor: 8, data: -1}        tensor stays 8, and other axes take the rest
    train: {batch: 512}                accumulate and remat are not there, so both are free

A key that the file or the command line sets stays as it is, and `null` frees a key that the file sets: `mesh=null`. Model, batch, optimizer
and data are never touched. Rules that the file names stay, and their axes are then the axes of the mesh. Without rules, the shipped ones
are candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jgt import MeshSizes, PipelineConfig, Rules, make_rules
from jgt.document import InputError, Node, override, read

from ...config import Run, rules_document
from .layout import Candidate, Roles
from .plans import RunFile

LAYOUT = ("mesh", "rules", "pipeline", "train.remat", "train.accumulate")
"""The keys that are a layout."""
_LONG = 16_384
"""The tokens of a sequence from which on devices may share a row."""
SHIPPED = (
    "fsdp",
    "replicated",
    "hybrid",
    "zero1",
    "fsdp_tensor",
    "fsdp_sequence",
    "overlap",
    "pipeline",
    "pipeline_sequence",
    "context",
    "experts",
)
"""The shipped rules that a search tries, the simplest first: of layouts with the same program, the first one counts."""
MOST_ROWS = 16
"""The most rows that a device computes at once. With more, matmuls are not faster, and activations are larger."""
RECOMPUTE = ("matmuls", "block", "none")


@dataclass(frozen=True, kw_only=True)
class OpenLayout:
    """A run whose layout is open, and what of the layout is set.

    run: without mesh, rules and pipeline. mesh: the sizes that are set, by axis. axes: the only axes there may be; None if a size is -1 or
    there is no mesh. rules: the run's own. stage: the axis that the run's file gives to its pipeline. remat, accumulate: None if they are
    open. given: the keys of the layout that are set.
    """

    file: RunFile
    run: Run
    mesh: Mapping[str, int]
    axes: tuple[str, ...] | None
    rules: Rules | None
    stage: str
    remat: str | None
    accumulate: int | None
    given: tuple[str, ...]

    @classmethod
    def read(cls, file: RunFile, free: Collection[str] = ()) -> OpenLayout:
        """Reads a run's file. Raises InputError with every problem; a key that is absent, null, -1 or in `free` is open."""
        root, problems = read(file.config), list[str]()
        stage = root.find("pipeline.axis").value
        for assignment in file.overrides:
            with InputError.collect(problems):
                root = override(root, assignment)
        run = file.adding("mesh=null", "rules=null", "pipeline=null", "budget=null").load(problems)

        def given(key: str) -> Node | None:
            node = root.find(key)
            return None if key in free or node.key != key or node.value is None else node

        if (pipeline := given("pipeline")) is not None:
            problems.append(pipeline.problem("a search chooses the pipeline itself, but this one is set. Free it with pipeline=null"))
        mesh = given("mesh")
        sizes = {} if mesh is None else MeshSizes.read(mesh, problems)
        if "mesh" in free:
            # The command line may set axes one by one: `mesh.tensor=1`.
            axes = root.find("mesh").children.items()
            sizes = {axis: node.value for axis, node in axes if isinstance(node.value, int) and node.where.startswith("command line")}
        rules = None
        if (node := given("rules")) is not None:
            document = rules_document(node, Path(file.config).parent, problems)
            rules = None if document is None else make_rules(document)
        if problems:
            raise InputError(problems)
        remat, accumulate = (None if (node := given(f"train.{key}")) is None else node.plain() for key in ("remat", "accumulate"))
        return cls(
            file=file,
            run=run,
            mesh={axis: size for axis, size in sizes.items() if size != -1},
            # A mesh without a -1 has no room for another axis.
            axes=None if mesh is None or -1 in sizes.values() else tuple(sizes),
            rules=rules,
            stage=stage if isinstance(stage, str) else PipelineConfig.axis,
            remat=None if remat in (None, "auto") else str(remat),
            accumulate=accumulate,
            given=tuple(key for key in LAYOUT if (node := given(key)) is not None and node.value != "auto"),
        )


def layouts_of(fixed: OpenLayout) -> Iterator[tuple[str | None, Rules, Roles, str]]:
    """The rules to try with their name, the roles of their axes and the axis of a pipeline: the run's own rules, or the shipped ones."""
    if fixed.rules is not None:
        yield None, fixed.rules, Roles.of(fixed.rules, fixed.stage), fixed.stage
        return
    has_experts = getattr(fixed.run.config.model, "experts", None) is not None
    is_long = (fixed.run.config.model.seq or 0) >= _LONG
    for name in SHIPPED:
        if (name == "experts") is has_experts and (name != "context" or is_long):
            rules = make_rules(read(f"jgt:{name}", Rules.FOLDER))
            yield f"jgt:{name}", rules, Roles.of(rules, PipelineConfig.axis), PipelineConfig.axis


def candidates(fixed: OpenLayout, num_devices: int) -> tuple[Candidate, ...]:
    """All layouts on a number of devices that a run's file leaves open. Raises InputError if it leaves nothing that fits."""
    run = fixed.run
    found: dict[object, Candidate] = {}
    for name, _, roles, stage in layouts_of(fixed):
        for mesh in _meshes(roles, stage, fixed, num_devices):
            for one in _splits(fixed, name, roles, stage, mesh):
                found.setdefault(_program_of(one), one)
    if not found:
        shown = ", ".join(f"{axis}={size}" for axis, size in fixed.mesh.items()) or "no fixed size"
        batch_size = run.config.train.batch
        raise InputError(
            [
                f"{run.where('mesh')}: search: no layout uses {num_devices} devices with {shown} and train.batch {batch_size}. "
                "Each axis has to divide the number of devices, and the axes of the batch its rows. Free more keys with KEY=null"
            ]
        )
    return tuple(found.values())


def index_of(run: Run, fixed: OpenLayout, space: Sequence[Candidate]) -> int | None:
    """The index of the layout that a run has; None if it is not among these. fixed: the same run with its layout open."""
    train = run.config.train
    rest = (run.config.devices.virtual_cpu or 1) // math.prod(size for size in run.mesh.values() if size != -1)
    mesh = tuple((axis, rest if size == -1 else size) for axis, size in run.mesh.items())
    # Every layout has the run's own value of a key that is not searched.
    remat = None if all(one.remat is None for one in space) else str(train.remat)
    programs = [_program_of(one) for one in space]
    for name, rules, roles, _ in layouts_of(fixed):
        own = Candidate(mesh=mesh, rules=name, roles=roles, accumulate=train.accumulate, rows=1, remat=remat, stages=run.pipeline)
        own = replace(own, rows=train.batch // (own.rows_at_once * own.parts))
        if rules == run.rules and _program_of(own) in programs:
            return programs.index(_program_of(own))
    return None


def _program_of(one: Candidate) -> tuple[object, ...]:
    """Everything that a layout's program depends on: rules with an axis of size 1 say the same as rules without it."""
    roles, tensor = one.roles, one.size(one.roles.tensor)
    others = frozenset(pair for pair in one.mesh if pair[0] in roles.others and pair[1] > 1)
    sizes = [one.size(axes) for axes in (roles.copies, roles.state, roles.weights, roles.experts, roles.context)]
    flags = (tensor > 1 and roles.sequence, tensor > 1 and roles.overlap)
    return (*sizes, tensor, one.num_stages, others, *flags, one.accumulate, one.rows, one.remat, one.stages)


def _meshes(roles: Roles, stage: str, fixed: OpenLayout, num_devices: int) -> Iterator[dict[str, int]]:
    """All sizes of the rules' axes, outermost first, that multiply to the number of devices."""
    # Axes that talk most are innermost, next to each other on a host.
    weights = [axis for axis in roles.batch if axis in roles.weights]
    experts = [axis for axis in roles.experts if axis not in weights]
    rest = [axis for axis in roles.batch if axis not in (*weights, *experts)]
    others = sorted(roles.others, key=lambda axis: axis != stage)
    ordered = list(dict.fromkeys([*rest, *weights, *experts, *others, *roles.context, *roles.tensor]))
    if any(size > 1 and axis not in ordered for axis, size in fixed.mesh.items()):
        return
    open_axes = [axis for axis in ordered if axis not in fixed.mesh]
    devices, over = divmod(num_devices, math.prod(fixed.mesh.get(axis, 1) for axis in ordered))
    if over or (fixed.axes is not None and devices != 1):
        return
    for sizes in _factors(devices, len(open_axes)):
        chosen = dict(zip(open_axes, sizes, strict=True))
        yield {axis: fixed.mesh.get(axis, chosen.get(axis, 1)) for axis in ordered}


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of `count` factors."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in (d for d in range(1, number + 1) if number % d == 0):
        for rest in _factors(number // first, count - 1):
            yield (first, *rest)


def _splits(fixed: OpenLayout, name: str | None, roles: Roles, stage: str, mesh: Mapping[str, int]) -> Iterator[Candidate]:
    """The ways to compute the batch on a mesh: parts, pipeline, recompute."""
    run = fixed.run
    rows, over = divmod(run.config.train.batch, math.prod(mesh[axis] for axis in roles.batch))
    # A ring in zigzag order has two parts of the sequence on each device.
    parts = math.prod(mesh[axis] for axis in roles.context)
    if over or (parts > 1 and (run.config.model.seq or 0) % (2 * parts)):
        return
    layers: int | None = getattr(run.config.model, "layers", None)
    remats: tuple[str | None, ...] = (None,) if layers is None or fixed.remat is not None else RECOMPUTE
    for at_once in (n for n in range(1, min(rows, MOST_ROWS) + 1) if rows % n == 0 and n & (n - 1) == 0):
        parts = rows // at_once
        plain = Candidate(mesh=tuple(mesh.items()), rules=name, roles=roles, rows=at_once, accumulate=1, remat=None)
        if mesh.get(stage, 1) > 1:
            if fixed.accumulate in (None, 1):
                # A pipeline recomputes by its own key, whose `layer` is the trainer's `block`, or a layer by the trainer's.
                kept = [remat for remat in remats if remat != "block" or len(remats) == 1]
                for remat, stages in itertools.product(kept, _pipelines(plain, stage, parts, layers)):
                    if stages.remat == "none" or remat in (None, "none"):
                        yield replace(plain, remat=remat, stages=stages)
        elif fixed.accumulate in (None, parts):
            for remat in remats:
                yield replace(plain, accumulate=parts, remat=remat)


def _pipelines(plain: Candidate, stage: str, microbatches: int, layers: int | None) -> Iterator[PipelineConfig]:
    num_stages = plain.size([stage])
    # Fewer microbatches than stages leave more than half of a step to the bubble.
    if microbatches < num_stages:
        return
    gathers = ("step", "layer") if plain.size(plain.roles.weights) > 1 else ("step",)
    for (schedule, virtual), remat, gather in itertools.product(PipelineConfig.tried, ("none", "layer"), gathers):
        chunks = num_stages * (virtual or 1)
        if layers is not None and (layers < chunks or (virtual is not None and layers % chunks)):
            continue
        if virtual is not None and microbatches % num_stages:
            continue
        how = PipelineConfig(signal="layers", microbatches=microbatches, axis=stage, schedule=schedule, virtual=virtual)
        yield replace(how, remat=remat, gather=gather)
