"""Checks the `sync:` section against the rest of a run's file. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jgt import Rules
from jgt.document import nearest

from ..models.config import OwnModel
from ..settings.command_line import may_have_fewer
from .config import Run


def sync_problems(run: Run) -> Iterator[str]:
    """Everything that keeps a run from its `sync:` section, with file and line. Sizes of -1 are left to `replica_problems`."""
    sync, train = run.config.sync, run.config.train
    if sync is None:
        return
    yield from _axis_problems(run, sync.axis, has_phases=sync.every > 1)
    if sync.late and train.skip_spikes is not None:
        text = "a spike's gradient is applied one step later, so it cannot be combined with sync.late. Use null"
        yield run.root.find("train.skip_spikes").problem(text)
    if sync.every == 1:
        # Rows of several replicas meet in these, so that the sum of the replicas' gradients would be another gradient.
        why = "cannot be combined with sync.every: 1, which keeps the rows of replicas apart. Use a larger every"
        yield from (run.root.find(key).problem(f"code of your own {why}") for key in ("model.kind", "train.loss") if run.own(key))
        if not isinstance(run.config.model, OwnModel) and run.config.model.fp8:
            yield run.root.find("model.fp8").problem(f"true {why}")
    if train.epochs is None and train.steps is not None and sync.every > train.steps:
        why = f"{sync.every} is more than train.steps {train.steps}: there would be one exchange, at the end"
        yield run.root.find("sync.every").problem(f"{why}. Use at most {train.steps}, or more steps")


def replica_problems(run: Run, mesh: Mapping[str, int]) -> Iterator[str]:
    """An axis of one device. mesh: axis sizes, all of them known. A size of -1 may be 1 where the launcher has lost the other groups."""
    sync = run.config.sync
    if sync is not None and mesh.get(sync.axis) == 1 and not (run.mesh.get(sync.axis) == -1 and may_have_fewer()):
        why = f"the mesh has 1 device along {sync.axis}, so there is no other replica to exchange with"
        yield run.root.find("sync.axis").problem(f"{why}. Remove sync:, or raise the size")


def _axis_problems(run: Run, axis: str, *, has_phases: bool) -> Iterator[str]:
    """An axis that is missing, has one device, is not the outermost of the batch, or splits something other than the batch."""
    node = run.root.find("sync.axis")
    if run.mesh and axis not in run.mesh:
        yield node.problem(f"the mesh has no axis {axis!r}. {nearest(axis, run.mesh)}")
        return
    yield from replica_problems(run, run.mesh)
    if run.config.rules is not None and run.rules == Rules():
        # The rules could not be read, which is reported already.
        return
    batch = run.batch_dims[0]
    splits = f"the batch is split over {', '.join(batch) or 'no axis'}"
    if axis not in batch:
        yield node.problem(f"{splits}, not over {axis}. Name one of its axes, or change its rule")
    elif batch[0] != axis:
        remedy = f"Write it first ([{', '.join([axis, *(a for a in batch if a != axis)])}]), or name {batch[0]}"
        yield node.problem(f"{splits}: only the outermost, {batch[0]}, can be exchanged apart. {remedy}")
    for where, pattern, what in _other_uses(run.rules, axis, with_state=has_phases):
        why = f"splits {what} over {axis}, along which sync.axis ({node.where}) has whole replicas"
        yield f"{where}: {pattern}: {why}. Take {axis} out of this rule, or name another axis there"


def _other_uses(rules: Rules, axis: str, *, with_state: bool) -> Iterator[tuple[str, str, str]]:
    """The file:line and the pattern of the rules that split anything but rows over an axis."""
    for part in (rules, *rules.signals):
        yield from ((rule.where, rule.pattern, "parameters") for rule in part.params if axis in rule.axes)
        if with_state:
            yield from ((rule.where, rule.pattern, "the optimizer state") for rule in part.optimizer if axis in rule.axes)
    specs = [*rules.inputs, *(rule for signal in rules.signals for rule in (*signal.tensors, *signal.backward_tensors))]
    specs += [rule for signal in rules.signals for rule in (signal.out, signal.backward_out) if rule is not None]
    for rule in specs:
        # The rows are the first dim.
        if any(axes is not ... and axis in axes for axes in rule.spec[1:]):
            yield rule.where, rule.pattern, "another dim than the rows"
