"""A run that is opened: its program and its data on the devices, and what is called while it trains. Wrong input is found here.

What is wrong on one process ends all of them, with the same exit code, so each function here exchanges it (`agree_on_input`).
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jgt import amount, document, make_rules, path_text
from jgt.document import InputError

from ..config import Run, without_effect
from ..data.batches import Data
from ..data.config import OwnData
from ..data.opening import open_data, open_own_data
from ..data.own import open_own
from ..export.form import run_form
from ..processes.processes import agree_on_input, agreed, number_of_processes
from ..records.console import Screen
from ..records.summary import describe_data
from ..setup import Setup, prepare
from ..setup.feed import eval_batch_of, local_rows
from ..setup.fit import compiled_to_fit, with_remat
from ..setup.program import Element
from ..setup.published import base_shapes
from .directory.folder import CONFIG
from .directory.identity import Resume, check_data
from .hooks import Evaluations, Hook, open_evaluations, open_hooks
from .hooks.evaluator import TaskMetrics


def opened_data(run: Run) -> Data:
    """The data of a run. Raises InputError."""
    data, folder, seed = run.config.data, run.config.run.path, run.config.run.seed
    sizes = {"seq": run.config.model.seq, "vocab": run.config.model.vocab}
    if isinstance(data, OwnData):
        source = open_own(data, run.code, run.where, **sizes, seed=seed)
        return open_own_data(source, data, seed=seed, processes=number_of_processes())
    return open_data(data, **sizes, seed=seed, cache_dir=folder / "data", where=run.where)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The program and the data of a run, and what is called while it trains.

    reference: as in `Kept`. ended_at: the step at which the run has ended early, if a start finds that it has.
    """

    setup: Setup
    data: Data
    tasks: TaskMetrics | None
    evaluations: Evaluations | None
    hooks: Sequence[Hook]
    reference: Mapping[str, object] | None = None
    ended_at: int | None = None

    def has_ended(self, step: int) -> bool:
        """Whether a run whose newest checkpoint is of this step has ended, as far as its files can be read."""
        return step >= self.setup.run.steps or (self.evaluations is not None and self.evaluations.begin(step))


def open_all(run: Run, resume: Resume) -> Opened:
    """Opens all of a run that may be wrong. Raises InputError, on all processes."""
    setup, data = open_run(run, resume)
    return Opened(
        setup=setup,
        data=data,
        tasks=open_tasks(setup),
        evaluations=evaluations_of(setup, data.eval_parts),
        hooks=agreed(lambda: open_hooks(run)),
    )


def open_run(run: Run, resume: Resume | None = None) -> tuple[Setup, Data]:
    """The program and the data of a run. Raises InputError, on all processes, with everything that is wrong with either."""
    config = run.config
    problems: list[str] = []
    setup = data = None
    if isinstance(config.data, OwnData):
        # First, because its samples say which arrays the program gets.
        with InputError.collect(problems):
            data = opened_data(run)
    # The data is opened even if the program is wrong, so that all problems are reported at once.
    if data is not None or not problems:
        with InputError.collect(problems):
            setup = _prepared(run, None if data is None else data.element)
    if setup is not None and config.checkpoint.export is not None:
        # Now, and not after days of training.
        with InputError.collect(problems):
            shapes = [(path_text(path), x) for path, x in jax.tree.leaves_with_path(base_shapes(setup))]
            run_form(run, config.run.path, {path: tuple(x.shape) for path, x in shapes if config.model.exports(path)})
    if not isinstance(config.data, OwnData):
        with InputError.collect(problems):
            data = opened_data(run)
    # One process suffices for this check: if it fails, the others stop in agree_on_input too.
    if data is not None and jax.process_index() == 0:
        with InputError.collect(problems):
            check_data(run, data.fingerprint, resume or Resume())
    if setup is not None and data is not None:
        with InputError.collect(problems):
            eval_batch_of(data, setup)
            _check_rows(run, data, setup)
    its_data = f"its data ({run.where('data')}: data)"
    agree_on_input(problems, {"its config": run.resolved(), its_data: None if data is None else data.fingerprint})
    assert setup is not None and data is not None
    element, opened = setup.program.element, setup.run
    setup = with_remat(setup, lambda remat: prepare(opened, element=element, remat=remat), compiled_to_fit)
    return setup.with_epochs(data.train_sequences), data


def _check_rows(run: Run, data: Data, setup: Setup) -> None:
    """Raises InputError if processes share rows of a batch, of which each would draw other values."""
    name, x = next(iter(setup.batch_shapes.items()))
    # All processes have as many.
    if jax.process_count() * len(local_rows(setup.batch_shardings[name], x.shape)) > x.shape[0] and not data.is_repeatable:
        why = "samples have other values each time they are read, and several processes read the same rows, so their numbers would differ"
        remedy = "Draw from the rng of data.transform (docs/own.md, Augmentation), or split the batch over all processes"
        raise InputError([f"{run.where('data.source')}: data.source: {why}. {remedy}"])


def open_tasks(setup: Setup) -> TaskMetrics | None:
    """The tasks of `eval:`. Raises InputError, on all processes."""
    run = setup.run
    if not run.config.eval.tasks:
        return None
    # The harness takes seconds to import, and is optional.
    harness = importlib.import_module("..evaluate.harness", __package__)
    return agreed(lambda: harness.TasksOfRun(setup, run.config.data.tokenizer_name).metrics)


def evaluations_of(setup: Setup, eval_parts: Sequence[str]) -> Evaluations | None:
    """The evaluations by which `checkpoint.best` and `train.stop_early` decide. eval_parts: the names of the data's.

    Raises InputError, on all processes.
    """
    parts = ("", *(f"/{part}" for part in eval_parts if len(eval_parts) > 1)) if eval_parts else ()
    return agreed(lambda: open_evaluations(setup.run, lambda: [f"eval_{name}{part}" for name in setup.eval_metrics for part in parts]))


def dry_run(run: Run) -> None:
    """Opens model and data on the devices, compiles the step, and prints its bytes per device."""
    # All processes open the run and compile, since compiling may need all of them; the first one prints.
    screen = Screen(enabled=jax.process_index() == 0)
    setup, data = open_run(run)
    screen.setup(setup)
    for line in (describe_data(data.fingerprint), *data.notes, *without_effect(setup.run, has_held_out=bool(data.eval_parts))):
        screen.say(line)
    started = time.perf_counter()
    memory = setup.compile_train_step().memory_analysis()
    screen.say(f"Compiled the step in {time.perf_counter() - started:.1f} s")
    shapes, places = setup.shapes, setup.shardings
    rows = [
        ["parameters", amount(_bytes_per_device((shapes.params, shapes.frozen), (places.params, places.frozen)), "B")],
        ["optimizer state", amount(_bytes_per_device(shapes.opt_state, places.opt_state), "B")],
        *([["variables", amount(_bytes_per_device(shapes.variables, places.variables), "B")]] if shapes.variables else []),
        ["batch", amount(_bytes_per_device(setup.batch_shapes, setup.batch_shardings), "B")],
        # XLA's own figure: what it allocates beyond arguments and results.
        ["temporary (activations, gradients)", amount(memory.temp_size_in_bytes, "B")],
        ["arguments", amount(memory.argument_size_in_bytes, "B")],
        ["outputs (donated)", f"{amount(memory.output_size_in_bytes, 'B')} ({amount(memory.alias_size_in_bytes, 'B')})"],
    ]
    screen.table("Bytes per device", ["what", "bytes"], rows, numbers=1)


def _bytes_per_device(shapes: object, shardings: object) -> int:
    """The bytes of one device's shards of a tree of arrays. The trees of shapes and of shardings have the same structure."""
    shards = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(shards))


def _prepared(run: Run, element: Element | None) -> Setup:
    """The program of a run, under the rules that an earlier start of it chose if they still fit. Raises InputError."""
    file = run.config.run.path / CONFIG
    if run.rules.otherwise is not None and file.is_file():
        # If they were chosen for another mesh or model, or the file is damaged, new ones are chosen.
        with contextlib.suppress(InputError):
            stored = document.read(file).find("rules")
            rules, by = make_rules(stored), run.rules.otherwise
            # Under another rules file than before, too: it splits something else, or over other axes.
            used = {axis for rule in (*rules.params, *rules.optimizer) for axis in rule.axes}
            is_same = rules.inputs == run.rules.inputs and bool(rules.optimizer) == bool(by.optimizer)
            is_same = is_same and used == {axis for axis in by.axes if run.mesh.get(axis, 1) != 1}
            if is_same and rules.otherwise is None and not rules.signals:
                return prepare(replace(run, rules=rules, rules_root=stored), element=element)
    return prepare(run, element=element)
