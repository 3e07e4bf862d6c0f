"""The moment of a run that a hook is called with: what it may read, and where it may log.

    def watch(now):
        now.histogram("table", now.params["embed"]["table"])
        now.text("sample", now.loaded.generate(["Once upon"])[0].text)
        return {"largest": jnp.max(now.params["embed"]["table"])}

Nothing that a hook does to it reaches training: arrays of JAX cannot be written to, and the containers around them are copies. The next
step takes the memory of the arrays, so a hook that wants to keep one has to copy it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ...generate.loaded import Loaded
from ...records.media import Histogram, Image, Medium
from ...setup import Setup
from ...step.objective import RESERVED
from ...step.state import State
from .evaluations import EVENT


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A moment of a run: one of its steps, and an event there.

    event: start, step, eval, save or end. step, last_step: the updates so far, and those of the whole run. metrics: the numbers of the step
    by name, and of its evaluation. state: the state after the step, as training has it: arrays in the layout of the rules, some perhaps in
    another form than the model's. programs: a model without arrays, with the programs that earlier moments have compiled. show(name,
    value): gives images, histograms and texts to the loggers. scalars: the numbers that the hook has logged. given: the arrays of `params`.
    """

    event: str
    step: int
    last_step: int
    metrics: Mapping[str, Any]
    setup: Setup
    state: State
    programs: Loaded
    show: Callable[[str, Medium], None]
    scalars: dict[str, float] = field(default_factory=dict[str, float])
    given: list[jax.Array] = field(default_factory=list[jax.Array])

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The model of an evaluation, as `jgt.load` returns it: `logits`, `generate`, `params`, `variables`, `tokenizer`."""
        setup = self.setup
        params, variables = setup.model_params(setup.eval_params(self.state)), setup.eval_variables(self.state)
        self.given[:] = jax.tree.leaves(params)
        return self.programs.of(params, variables, self.step)

    @property
    def params(self) -> Any:
        """The parameters of the model that is evaluated, which is the average with `train.ema`, in the shapes of the model."""
        return self.loaded.params

    @property
    def model(self) -> Any:
        """The module that a loss gets in an evaluation: an nnx.Module, or a bound module of linen."""
        return self.loaded.model

    def scalar(self, name: str, value: object) -> None:
        """Logs a number, as the mapping that a hook returns does. Raises ValueError for a name that is taken, or another value."""
        number = fetched(value)
        if number.size != 1 or number.dtype.kind not in "biuf":
            raise ValueError(f"the metric {name} is {number.dtype}{list(number.shape)}, not a number")
        if name in (*RESERVED, EVENT) or name in self.metrics or name in self.scalars:
            raise ValueError(f"the step has a metric {name!r} already. Take another name")
        self.scalars[name] = float(number.reshape(()))

    def image(self, name: str, value: object) -> None:
        """Logs an image: an array [height, width] or [height, width, channels], or a figure of matplotlib.

        Floats are between 0 and 1. Raises ValueError for other arrays.
        """
        self.show(name, Image.of(fetched(value) if isinstance(value, jax.Array) else value))

    def histogram(self, name: str, values: object) -> None:
        """Logs a histogram of the values of an array of any shape. Raises ValueError if none of them is finite."""
        self.show(name, Histogram.of(fetched(values)))

    def text(self, name: str, text: str) -> None:
        """Logs a text."""
        self.show(name, str(text))


def fetched(value: object) -> np.ndarray:
    """An array on the host. All processes call this if the array is distributed over them."""
    if isinstance(value, jax.Array):
        is_here = value.is_fully_addressable or value.is_fully_replicated
        value = jax.device_get(value) if is_here else multihost_utils.process_allgather(value, tiled=True)
    array = np.asarray(value)
    # numpy's own code does not know bf16 and its like.
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.kind != "f" else array
