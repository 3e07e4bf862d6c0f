"""Plans for a search: the answer to a question of `search/plans.py`, made in the process that calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jgt.document import InputError

from ..code.files import read_code
from ..config import load
from ..search.plans import Answer, Question
from .make import make_plan


def answer(question: Question) -> Answer:
    """Plans a layout. What is wrong with it is in the answer's problems."""
    try:
        run = load(question.config, question.overrides, code=read_code(question.code))
        return _of_plan(make_plan(run, question.target, question.target.num_devices).to_json())
    except InputError as error:
        return Answer(problems=tuple(error.problems))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return Answer(problems=(lines[0][:300],))


def _of_plan(plan: Mapping[str, Any]) -> Answer:
    memory, step = plan["memory"], plan["step_time_ms"]
    return Answer(
        seconds=0.0 if step is None else step / 1e3,
        peak_bytes=memory["peak_bytes"],
        args_bytes=memory["args_bytes"],
        activations=sum(memory["activations"].values()),
        fits=memory["fits"] is not False,
        flops=plan["flops_per_device"],
        model_flops=plan["model_flops_per_device"],
        parameter_bytes=sum(p["local_bytes"] for p in plan["parameters"]),
        parameters=sum(math.prod(p["shape"]) for p in plan["parameters"]),
        exposed={axes: ms / 1e3 for axes, ms in plan["exposed_ms"].items()},
        parts={part: ms / 1e3 for part, ms in plan["parts_ms"].items()},
        warnings=tuple(plan["warnings"]),
    )
