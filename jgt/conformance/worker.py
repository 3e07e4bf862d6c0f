# pyright: basic
"""A process that draws and judges programs: jobs come as lines of JSON, and answers go back in the same way.

XLA's compiler may abort, which ends the process. So each program is named before it is compiled (`trying`), and the process that asks
starts another one (campaign.py).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

import jgt
from jgt.conformance.classes import form_on_axes, is_hidden
from jgt.conformance.grammar import draw_chain, single_operations
from jgt.conformance.judge import Judge, WrongArray, as_is, on_mesh, outcome_of, shaped, values_of
from jgt.conformance.layouts import MESHES, cells, lay_out, least_met, num_layouts
from jgt.conformance.program import AXES, DRAWS, DrawnProgram
from jgt.sharding.partitioner import avoided_faults
from jgt.signal import context, tensor

LAYOUTS = 3
"""The layouts of a chain, each compiled alone."""
_Answer = dict[str, Any]
_Run = Callable[[Sequence[Mapping[str, jax.Array]]], Sequence[Mapping[str, jax.Array]]]
"""From the arguments of each program to its results."""


class Worker:
    """Answers jobs. run: makes a function of the arguments of several programs from these. say: gets what comes before an answer."""

    def __init__(self, run: Callable[[Sequence[DrawnProgram]], _Run], say: Callable[[_Answer], None]):
        self._run, self._say = run, say
        self._met: Counter[str] = Counter()
        self._muted: Mapping[tuple[str, ...], int] = {}

    def answer(self, job: Mapping[str, Any]) -> _Answer:
        """The answer to one job."""
        answer = getattr(self, f"_{job['do']}")(job)
        return answer | {"cpu": time.process_time()}

    def _know(self, job: Mapping[str, Any]) -> _Answer:
        self._met = Counter(job["met"])
        self._muted = {tuple(forms): times for forms, times in job["muted"]}
        return {}

    def _chain(self, job: Mapping[str, Any]) -> _Answer:
        rng = random.Random(f"chain {job['seed']}")
        met, luck = self._met if job["steered"] else Counter(), rng.random()
        program = draw_chain(rng, met, shaped, lambda program: is_hidden(self._muted, program.forms, luck))
        drafts = [lay_out(rng, program, rng.choice(MESHES)) for _ in range(2 * LAYOUTS) if program.steps]
        laid_out: list[DrawnProgram] = []
        while drafts and len(laid_out) < LAYOUTS:
            laid_out.append(least_met(met, drafts, cells))
            drafts.remove(laid_out[-1])
            met.update(cells(laid_out[-1]))
        return self._judge_each(laid_out, DRAWS)

    def _single(self, job: Mapping[str, Any]) -> _Answer:
        rng = random.Random(f"single {job['seed']}")
        met, luck = self._met if job["steered"] else Counter(), rng.random()
        pairs = [(operation, mesh) for operation in single_operations() for mesh in sorted(set(MESHES)) if len(mesh) > 1]
        wanted = [pair for pair in pairs if not is_hidden(self._muted, [form_on_axes(pair[0], len(pair[1]))], luck)] or pairs
        weights = [num_layouts(*pair) ** 0.5 / (1 + met[f"{pair[0].steps[0].code} on {pair[1]}"]) for pair in wanted]
        operation, mesh = rng.choices(wanted, weights)[0]
        cell = f"{operation.steps[0].code} on {mesh}"
        met[cell] += 1
        program = replace(shaped(operation), salt=rng.randrange(10**6), gradient=rng.random() < 0.5)
        laid_out = [lay_out(rng, program, mesh, share=0.8) for _ in range(job["layouts"])]
        answer = self._judge_all(laid_out, [Judge(program, draw) for draw in DRAWS])
        return answer | {"cells": [cell]}

    def _judge(self, job: Mapping[str, Any]) -> _Answer:
        try:
            programs = [shaped(DrawnProgram.of_json(program)) for program in job["programs"]]
        except Exception as error:
            return _nothing(refused=[f"{type(error).__name__}: {error}"[:300]])
        answer = self._judge_each(programs, job["draws"])
        one_device = [self._is_of_one_device(found) for found in answer["wrong"]]
        return answer | {"one device": one_device}

    def _judge_each(self, programs: Sequence[DrawnProgram], draws: Sequence[int]) -> _Answer:
        """Judges layouts of one program, each compiled alone."""
        judges = [Judge(program, draw) for program in programs[:1] for draw in draws]
        answers = [self._judge_all([program], judges) for program in programs]
        return _sum(answers) | {"drawn": [program.to_json() for program in programs]}

    def _judge_all(self, programs: Sequence[DrawnProgram], judges: Sequence[Judge]) -> _Answer:
        """Judges several layouts of one program, compiled together. If XLA refuses them, each half is compiled alone."""
        self._say({"trying": programs[0].to_json(), "of": len(programs)})
        wrong: dict[int, list[WrongArray]] = {}
        try:
            run = self._run(programs)
            for judge in judges:
                for number, results in enumerate(run([judge.arguments] * len(programs))):
                    if found := judge.differences(results):
                        wrong.setdefault(number, []).extend(found)
        except Exception as error:
            if half := len(programs) // 2:
                return _sum([self._judge_all(part, judges) for part in (programs[:half], programs[half:])])
            return _nothing(programs=1, refused=[f"{type(error).__name__}: {error}"[:300]])
        found = [{"program": programs[n].to_json(), "differences": [asdict(difference) for difference in wrong[n]]} for n in wrong]
        met = [cell for program in programs for cell in cells(program)]
        right = len(programs) - len(found)
        return _nothing(programs=len(programs), wrong=found, right=right, changed=getattr(run, "changed", 0), cells=met)

    @staticmethod
    def _is_of_one_device(found: Mapping[str, Any]) -> bool:
        """Whether a wrong program is wrong on one device, too, once it is compiled."""
        program, wrong = DrawnProgram.of_json(found["program"]), found["differences"]
        judge = Judge(program, wrong[0]["draw"])
        alone = judge.differences(jax.jit(lambda arguments: outcome_of(program, arguments, as_is))(judge.arguments))
        return bool({difference.what for difference in alone} & {difference["what"] for difference in wrong})


def _nothing(**more: object) -> _Answer:
    return {"programs": 0, "right": 0, "changed": 0, "wrong": [], "refused": [], "cells": [], "drawn": []} | more


def _sum(answers: Sequence[_Answer]) -> _Answer:
    total = _nothing()
    return {key: sum((answer[key] for answer in answers), value) for key, value in total.items()}


def plainly(programs: Sequence[DrawnProgram]) -> _Run:
    """The programs as a user's own constraints lay them out."""
    places = [on_mesh(program) for program in programs]
    return jax.jit(lambda arguments: [outcome_of(*each) for each in zip(programs, arguments, places, strict=True)])


def through_jgt(programs: Sequence[DrawnProgram]) -> _Run:
    """The programs as `jgt.shard` lays them out by rules. Its `changed` is the number of operations that jgt gave another layout."""
    evaluated = [_sharded(program) for program in programs]
    jitted = jax.jit(lambda arguments: [outcome_of(p, a, as_is, e) for p, a, e in zip(programs, arguments, evaluated, strict=True)])

    def run(arguments: Sequence[Mapping[str, jax.Array]]) -> Sequence[Mapping[str, jax.Array]]:
        with avoided_faults() as avoided:
            found = jitted(arguments)
        run.changed += len(avoided)
        return found

    run.changed = 0
    return run


def _sharded(program: DrawnProgram) -> Callable[..., dict[str, jax.Array]]:
    """`values_of` by `jgt.shard`: an argument that has a gradient is a parameter, and every value is a named tensor."""
    specs = {name: [list(axes) or None for axes in spec] for name, spec in program.specs.items()}
    first = program.moved[:1]
    others = [value.name for value in program.inputs if value.name not in first]
    # A rule for a parameter counts the dims that are left where an index reads only a part of it, as chains may. A named tensor has all.
    is_single = [step.kind for step in program.steps] == ["single"]
    places = {"params": set(first) if is_single else set(), "inputs": set(others)}
    places["tensors"] = set(specs) - places["params"] - places["inputs"]
    rules = {key: {name: specs[name] for name in names if name in specs} for key, names in places.items()}
    inputs = rules.pop("inputs")
    mesh = jgt.make_mesh(dict(zip(AXES, program.mesh, strict=False)), devices=jax.devices()[: program.num_devices])

    def forward(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        with context("m"):
            return values_of(program, params | batch, lambda name, value: tensor(value, name))

    sharded = jgt.shard(forward, jgt.make_rules({"signals": {"m": rules}, "inputs": inputs, "default": "replicate"}), mesh, partial=True)

    def evaluate(_: DrawnProgram, arguments: Mapping[str, jax.Array], place: object) -> dict[str, jax.Array]:
        return sharded({name: arguments[name] for name in first}, {name: arguments[name] for name in others})

    return evaluate


def main() -> None:
    """Answers until the input ends."""
    os.nice(10)
    # What others print must not get among the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Mapping[str, object]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    worker = Worker(through_jgt if sys.argv[1:] == ["--jgt"] else plainly, say)
    for line in sys.stdin:
        say(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main()
