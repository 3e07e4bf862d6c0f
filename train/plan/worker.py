"""A process that makes plans: questions as lines of JSON on stdin, answers as lines of JSON on stdout, until stdin ends. A line has the
answer, and the bytes of memory that the process has needed so far.

XLA writes what it likes to stdout and stderr, so answers go to a copy of stdout that nothing else knows.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jgt.document import InputError
from jgt.hardware import parse_target

from ..code.files import read_code
from ..config import load
from ..search.plans import Answer, Question, from_json
from .make import make_plan


def serve() -> None:
    """Answers questions until there are no more. Ctrl-C is for the searching process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A mesh's warnings are in its plan.
    warnings.simplefilter("ignore")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        found = asdict(answer(from_json(Question, json.loads(line))))
        print(json.dumps([found, _peak_bytes()]), file=replies, flush=True)


def _peak_bytes() -> int:
    """The most memory that this process has had so far. macOS counts bytes, Linux KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def answer(question: Question) -> Answer:
    """Makes a plan in this process. What is wrong with the candidate is in the answer's problems."""
    try:
        run = load(question.config, question.overrides, code=read_code(question.code))
        target = parse_target(question.target, question.chip, question.changes)
        return _of_plan(make_plan(run, target, question.devices).to_json())
    except InputError as error:
        return Answer(problems=tuple(error.problems))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Answer(problems=(lines[0][:300],))


def _of_plan(plan: Mapping[str, Any]) -> Answer:
    memory, step = plan["memory"], plan["step_time_ms"]
    sent: dict[str, int] = {}
    for row in plan["collectives"]:
        axes = "+".join(row["axes"])
        sent[axes] = sent.get(axes, 0) + row["total_bytes"]
    return Answer(
        seconds=0.0 if step is None else step / 1e3,
        peak_bytes=memory["peak_bytes"],
        args_bytes=memory["args_bytes"],
        gradient_bytes=memory["gradient_bytes"],
        activations=sum(memory["activations"].values()),
        fits=memory["fits"] is not False,
        flops=plan["flops_per_device"],
        model_flops=plan["model_flops_per_device"],
        parameter_bytes=sum(p["local_bytes"] for p in plan["parameters"]),
        parameters=sum(math.prod(p["shape"]) for p in plan["parameters"]),
        exposed={axes: ms / 1e3 for axes, ms in plan["exposed_ms"].items()},
        sent=sent,
        links={axes: ms / 1e3 for axes, ms in plan["links_ms"].items()},
        parts={part: ms / 1e3 for part, ms in plan["parts_ms"].items()},
        warnings=tuple(plan["warnings"]),
    )
