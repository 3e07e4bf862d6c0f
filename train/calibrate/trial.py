"""Layouts on trial: their steps, measured on the devices at hand. A process of its own, which another one asks by JSON on stdin.

A plan's times are off by some percent, and layouts often differ by less. So what a search finds is measured before it is taken.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jgt.document import InputError

from ..code.files import read_code
from ..config import load
from ..processes.processes import start_jax
from ..xla import configure_xla
from .measured import Program, measure
from .steps import step_of_run


def answer_once() -> None:
    """Reads {config, overrides of each layout, code}, and prints the seconds of a step of each; null for a layout that does not run."""
    replies = os.fdopen(os.dup(1), "w")
    # XLA writes what it likes to stdout.
    os.dup2(2, 1)
    print(json.dumps(_seconds(**json.loads(sys.stdin.read()))), file=replies, flush=True)


def _seconds(config: str, overrides: Sequence[Sequence[str]], code: Sequence[str]) -> list[float | None]:
    programs: list[Program] = []
    devices: Sequence[Any] = ()
    for number, one in enumerate(overrides):
        try:
            run = load(config, one, code=read_code(code))
            if not devices:
                # XLA reads its flags once, so those of the first layout are those of all.
                configure_xla(run.config)
                start_jax(None, run.config.devices.virtual_cpu)
                devices = jax.local_devices()
            program = step_of_run(str(number), run, devices)
            # Here a layout fails that does not fit.
            program.seconds()
            programs.append(program)
        except (InputError, ValueError, RuntimeError, NotImplementedError) as error:
            print(f"layout {number + 1}: {str(error).splitlines()[0]}", file=sys.stderr)
    found = {one.name: one.seconds for one in measure(programs, lambda _: None)}
    return [found.get(str(number)) for number in range(len(overrides))]
