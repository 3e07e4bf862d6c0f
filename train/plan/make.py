"""A run's plan: its real training step, compiled from shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import jax

import jgt
from jgt import Plan, use_virtual_cpu
from jgt.document import InputError
from jgt.planner import Target, Workload, described_device

from ..config import Run
from ..files.streams import say
from ..models.config import OwnModel
from ..records.summary import tokens_per_sample
from ..setup import AUTO, Remat, Setup, prepare
from ..setup.fit import with_remat
from ..setup.xla import planned_flags
from .advice import Adviser, Setting
from .search.plans import PlanFigures, RunFile
from .sync import Exchange, formula_bytes

_SETTINGS = ("train.accumulate", "model.layers", "model.dtype", "model.attention", "optimizer.gradients", "optimizer.offload")
"""The keys that a plan may advise to change."""


def make_plan(run: Run, target: Target | None, *, price: float | None = None) -> Plan:
    """Plans the training step of a run, without a target for the run's CPU devices.

    price: dollars for an hour of one device. Raises InputError if there are fewer devices, or if rules, mesh and shapes do not fit.
    """
    jax.config.update("jax_platforms", "cpu")
    again = setup_maker(run, target)
    # The program that will run is the one that XLA compiles with the run's own flags.
    flags, warnings = planned_flags(run.config, has_gpu=target is not None and target.is_described)
    for warning in warnings:
        say(warning)
    plans: list[Plan] = []

    def fits(setup: Setup) -> Setup | None:
        work = _workload(setup, price)
        plan = jgt.plan(setup.train_step(), *setup.step_shapes, target=target, rules=run.rules, flags=flags, workload=work)
        settings, is_gpu = settings_of(run, setup.program.remat), target is not None and target.is_described
        adviser = Adviser(plan=plan, settings=settings, rows=_rows(setup), work=work, is_gpu=is_gpu)
        plans.append(plan.advised(adviser.advise()))
        return None if plan.memory.fits is False else setup

    setup = again(None)
    if run.config.train.remat == AUTO:
        say(f"train.remat: auto takes {with_remat(setup, again, fits).program.remat}")
    else:
        fits(setup)
    return plans[-1]


def _workload(setup: Setup, price: float | None) -> Workload:
    """The facts about a step that its program does not contain."""
    config, per_sample = setup.run.config, tokens_per_sample(setup.batch_shapes)
    tokens = None if per_sample is None else per_sample * config.train.batch
    flops = None if tokens is None else tokens * config.model.flops_per_token(setup.num_parameters, setup.num_frozen)
    return Workload(tokens=tokens, flops=flops, pipeline=setup.run.pipeline, price=price)


def _rows(setup: Setup) -> int:
    """The rows of the batch that a device computes at once."""
    run, sizes = setup.run, dict(setup.mesh.shape)
    shards = math.prod(sizes[axis] for axis in run.batch_dims[0])
    parts = run.config.train.accumulate * (1 if run.pipeline is None else run.pipeline.microbatches)
    return run.config.train.batch // (parts * shards)


def settings_of(run: Run, remat: Remat) -> dict[str, Setting]:
    """The keys that advice may change, as far as the run has them: a model or an optimizer of the user's own lacks some.

    remat: the setting of `train.remat` that the plan has.
    """
    values: dict[str, object] = {}
    for key in _SETTINGS:
        with contextlib.suppress(AttributeError):
            values[key] = attrgetter(key)(run.config)
    values["train.remat"] = remat
    if isinstance(run.config.model, OwnModel):
        # Its class may take no dtype.
        del values["model.dtype"]
    if run.pipeline is not None:
        values |= {f"pipeline.{key}": getattr(run.pipeline, key) for key in ("microbatches", "schedule", "remat")}
    return {key: Setting(value=value, where=run.where(key)) for key, value in values.items()}


def make_exchange(run: Run, target: Target | None) -> Exchange | None:
    """Plans the exchange of a run with `sync.every` above 1; None for others. Raises InputError as `make_plan` does."""
    sync = run.config.sync
    if sync is None or sync.every == 1:
        return None
    setup = setup_maker(run, target)(None)
    flags, _ = planned_flags(run.config, has_gpu=target is not None and target.is_described)
    programs = setup.exchanges
    assert programs is not None
    sizes = [fragment.numbers(setup.shapes.anchor, setup.shardings.anchor) for fragment in programs.fragments]
    largest = sizes.index(max(sizes))
    plan = jgt.plan(programs.exchange(largest), setup.shapes, target=target, rules=run.rules, flags=flags)
    formula = formula_bytes(sizes[largest], setup.mesh.shape[sync.axis], sync.wire)
    return Exchange(plan=plan, every=sync.every, fragments=sync.fragments, formula_bytes=formula)


def setup_maker(run: Run, target: Target | None, *, partial_rules: bool = False) -> Callable[[Remat | None], Setup]:
    """A function from the setting of `train.remat`, None for the run's own, to the run's setup. partial_rules: as in `prepare`."""
    if target is None or not target.is_described:
        count = num_devices_of(run) if target is None else target.num_devices
        _start(count)
        if len(jax.devices()) < count:
            have = f"JAX has started with {len(jax.devices())}"
            raise InputError([f"plan: {count} CPU devices are needed, but {have}. Plan in a new process"])
        devices = jax.devices()[:count]
        return lambda remat: prepare(run, devices=devices, remat=remat, partial_rules=partial_rules)

    def described_setup(remat: Remat | None) -> Setup:
        with described_device(target) as device:
            # The step is set up on an abstract mesh. Shardings on described devices would forget which arrays are in the host's
            # memory; the planner moves the traced program onto these devices afterwards, and marks such arrays itself.
            return prepare(run, num_devices=target.num_devices, like=device, remat=remat, partial_rules=partial_rules)

    return described_setup


def use_devices(runs: Sequence[Run]) -> None:
    """Starts JAX with enough CPU devices for all of these runs: it fixes their number when it starts."""
    _start(max(map(num_devices_of, runs)))
    jax.devices()


def _start(num_devices: int) -> None:
    with contextlib.suppress(RuntimeError):
        # In a process that has used JAX already, the number has no effect.
        use_virtual_cpu(num_devices)


def num_devices_of(run: Run) -> int:
    """The number of CPU devices that a run asks for. Raises InputError if it is unknown."""
    count = run.config.devices.virtual_cpu or (1 if run.config.mesh is None else None)
    if count is None and -1 in run.mesh.values():
        raise InputError(
            [f"{run.where('mesh')}: mesh: a size is -1, so the number of devices is unknown. Give it by --devices N, or --target"]
        )
    return count or math.prod(run.mesh.values())


def answer(file: RunFile, target: Target) -> PlanFigures:
    """Plans a layout. What is wrong with it is in the answer's problems."""
    try:
        return _of_plan(make_plan(file.load(), target).to_json())
    except InputError as error:
        return PlanFigures(problems=tuple(error.problems))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return PlanFigures(problems=(lines[0][:300],))


def _of_plan(plan: Mapping[str, Any]) -> PlanFigures:
    memory, step = plan["memory"], plan["step_time_ms"]
    return PlanFigures(
        seconds=0.0 if step is None else step / 1e3,
        peak_bytes=memory["peak_bytes"],
        args_bytes=memory["args_bytes"],
        activations=sum(memory["activations"].values()),
        fits=memory["fits"] is not False,
        flops=plan["flops_per_device"],
        model_flops=plan["model_flops_per_device"],
        parameter_bytes=sum(p["local_bytes"] for p in plan["parameters"]),
        parameters=sum(math.prod(p["shape"]) for p in plan["parameters"]),
        trained=sum(math.prod(p["shape"]) for p in plan["parameters"] if p["gradient_bytes"]),
        exposed={axes: ms / 1e3 for axes, ms in plan["exposed_ms"].items()},
        parts={part: ms / 1e3 for part, ms in plan["parts_ms"].items()},
        warnings=tuple(plan["warnings"]),
    )
