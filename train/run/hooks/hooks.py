"""The hooks of a run: code of the user's own that it calls while it trains, as the section `hooks:` says.

All processes call the same hooks at the same moments, after the steps under way. So a hook may compute with sharded arrays and log what it
finds, and a run without hooks does not wait for anything. After each call the processes tell each other whether it failed: then all of them
go on, or all of them save the state and end. A hook that does not return is the watch's to end, as all that hangs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jgt.document import InputError

from ...config import Run
from ...files.ends import EndError
from ...files.streams import say
from ...generate.loaded import Loaded
from ...processes.processes import true_on_all_processes
from ...processes.watch import Watch
from ...records.records import Records
from ...settings.code.files import Code
from ...settings.code.names import FAILURES, call_problem, call_with, checked_arguments, described, load_object
from ...settings.sections import HookConfig
from ...setup import Setup
from ...step.state import State
from .moment import Moment


class HookError(EndError):
    """A hook has failed, and all processes know it. The message says where."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A hook. where: the file and line of its entry, for messages. call: the user's object, which gets a moment."""

    name: str
    where: str
    config: HookConfig
    call: Callable[[Moment], object]

    def is_due(self, event: str, step: int) -> bool:
        """Whether it is called at an event of a step."""
        if event == "step":
            return self.config.every is not None and step % self.config.every == 0
        return event in self.config.at


class Hooks:
    """The hooks of one start of a run."""

    def __init__(self, hooks: Sequence[Hook], setup: Setup, watch: Watch, records: Records):
        self._hooks, self._setup, self._watch, self._records = hooks, setup, watch, records
        data = setup.run.config.data
        name = data.tokenizer_name
        self._programs = Loaded(setup=setup, params=None, variables=None, step=0, tokenizer_name=name)

    def are_due(self, event: str, step: int) -> bool:
        """Whether any of them is called at an event of a step: `step`, or one of `at`."""
        return any(hook.is_due(event, step) for hook in self._hooks)

    def call(self, event: str, state: State, step: int, last_step: int, metrics: Mapping[str, object]) -> dict[str, float]:
        """Calls the hooks of an event, in the order of the file, and returns the numbers that they log. metrics: those of the step.

        Raises HookError, on all processes.
        """
        found: dict[str, float] = {}
        for hook in self._hooks:
            if hook.is_due(event, step):
                moment = Moment(
                    event=event,
                    step=step,
                    last_step=last_step,
                    metrics={**metrics, **found},
                    setup=self._setup,
                    # Its containers are the hook's own.
                    state=jax.tree.map(lambda x: x, state),
                    programs=self._programs,
                    show=partial(self._records.medium, step),
                )
                with self._watch.phase(f"the hook {hook.name}"), self._records.phase("hook", step=step, hook=hook.name, event=event):
                    self._call(hook, moment, state)
                found |= moment.scalars
        return found

    def _call(self, hook: Hook, moment: Moment, state: State) -> None:
        failure = None
        try:
            for name, value in (returned(hook.call(moment)) or {}).items():
                moment.scalar(name, value)
            if "loaded" in moment.__dict__ and [*map(id, moment.given)] != [*map(id, jax.tree.leaves(moment.params))]:
                raise ValueError("it has changed now.params, which are its own copy, so the run would not. An optimizer changes parameters")
        except FAILURES as error:
            failure = _description(error)
        if "loaded" in moment.__dict__:
            # Only the programs: the arrays may be copies, and the next step may need their memory.
            self._programs = moment.loaded.of(None, None, 0)
        is_lost = any(x.is_deleted() for x in jax.tree.leaves(state))
        if true_on_all_processes(failure is None and not is_lost):
            return
        what = f"{hook.where}: hooks.{hook.name}: the call at step {moment.step} ({moment.event})"
        if not true_on_all_processes(not is_lost):
            why = "has deleted arrays of the state, for example by giving them to a function that donates its arguments. Give it copies"
            raise HookError(f"{what} {why}")
        message = f"{what} failed: {failure or 'in another process'}"
        if hook.config.on_error == "stop":
            raise HookError(message)
        if failure is not None:
            say(f"{message}. Training continues")


def returned(value: object) -> Mapping[str, object] | None:
    """The numbers that a hook has returned. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"it returned a value of type {type(value).__name__}. Return nothing, or a mapping of names to numbers")
    return value


def _description(error: BaseException) -> str:
    kept = "has been deleted" in str(error) or "was deleted" in str(error)
    hint = ". The arrays of a moment live until the next step. Keep a copy instead: jax.tree.map(jnp.copy, ...) or jax.device_get(...)"
    return described(error).rstrip(".") + (hint if kept else "")


def open_hooks(run: Run) -> list[Hook]:
    """The hooks of a run, imported and made. Raises InputError with everything that is wrong with them."""
    problems, hooks = list[str](), list[Hook]()
    for name, config in run.config.hooks.items():
        with InputError.collect(problems):
            call = _made(name, config, run.code, run.where)
            hooks.append(Hook(name=name, where=run.where(f"hooks.{name}"), config=config, call=call))
    if problems:
        raise InputError(problems)
    return hooks


def _made(name: str, config: HookConfig, code: Code, where: Callable[[str], str]) -> Callable[[Moment], object]:
    """The function of a hook. Raises InputError."""
    key = f"hooks.{name}.call"
    found: Any = load_object(config.call, key, code, where(key))

    def place(argument: str) -> str:
        full = f"hooks.{name}.{argument}" if argument else key
        return f"{where(full)}: {full}"

    arguments: Mapping[str, object] = {}
    if inspect.isclass(found):
        found = call_with(found, config.arguments, {}, place)
        if not callable(found):
            why = f"{config.call} makes a {type(found).__name__}, which cannot be called. Give the class a method __call__(self, now)"
            raise InputError([f"{place('')}: {why}"])
    else:
        moment = dict.fromkeys([*inspect.signature(found).parameters][:1])
        checked = checked_arguments(found, config.arguments, moment, place)
        arguments = {key: checked[key] for key in config.arguments}
    function = found if inspect.isroutine(found) else found.__call__
    if problem := call_problem(function, "now", **arguments):
        raise InputError([f"{place('')}: {problem}. Write a function of the moment: {getattr(found, '__name__', name)}(now)"])
    return partial(found, **arguments) if arguments else found
