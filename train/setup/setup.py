"""What exists of a run before its first step: the shapes of its state, where everything goes, and its compiled functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jgt.document import InputError

from ..config import Run
from ..models.kernels import AttentionChoice, AttentionKernel
from ..models.model import Model
from ..step.objective import Objective
from ..step.optimizer import MakeOptimizer
from ..step.parts import Parts
from ..step.schedule import Settings, settings_of_step
from ..step.step import State, make_eval_step, make_train_step
from ..step.update import update_all, update_in_turn
from ..sync.exchanges import ExchangePrograms, Exchanges
from .apart import apart_of
from .remat import Remat
from .state import COMPILED_ONCE, StateLayout


@dataclass(frozen=True, kw_only=True)
class Setup(StateLayout):
    """A run's parts, their shapes and where they go; built by `prepare`, nothing allocated.

    make_state: from a seed, uint32[], to the state before the first step. One function, so that JAX traces it once. element: the arrays of
    one row of a batch, by name. grouped: how the matmuls of experts run, as in the log; empty without experts. remat: `train.remat`, or
    what `auto` took. compiled: the step, if it is compiled already.
    """

    model: Model
    attention: AttentionChoice | None
    grouped: str
    remat: Remat
    loss_chunks: int
    make_optimizer: MakeOptimizer
    objective: Objective
    make_state: Callable[[Any], State]
    element: Mapping[str, jax.ShapeDtypeStruct]
    compiled: Any = None

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch."""
        return rows_of(self.element, self.run.config.train.batch)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Where each array of a batch goes."""
        return self.placement.inputs(self.batch_shapes)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(p.shape) for p in self.placement.parameters)

    def init(self) -> State:
        """The state before the first step, born sharded; the same values on every mesh."""
        # The seed is an argument. As a constant it would give each seed a program of its own, and the compilation cache would miss.
        return jax.jit(self.make_state, out_shardings=self.shardings, compiler_options=COMPILED_ONCE)(np.uint32(self.run.config.run.seed))

    def settings(self, step: int) -> np.ndarray:
        """The settings of a step, f32[3]: the third argument of the compiled step."""
        return settings_of_step(self.run.config.optimizer, self.run.steps, step)

    def with_epochs(self, samples_of_epoch: int, step: int = 0, samples: int = 0) -> Setup:
        """The setup with the number of steps that `train.epochs` makes, for a run that has taken `step` steps and read `samples` samples.

        The last step completes the last epoch, whatever batches the steps so far had.
        """
        train = self.run.config.train
        if train.epochs is None:
            return self
        left = math.ceil(train.epochs * samples_of_epoch) - samples
        return replace(self, run=replace(self.run, epoch_steps=max(step - (-left // train.batch), 1)))

    def train_step(self) -> Any:
        """The step under jax.jit: (state, batch, settings) → (state, metrics). The state's buffers are donated."""

        def pin(gradients: Any) -> Any:
            return jax.lax.with_sharding_constraint(gradients, self.stored.gradients)

        config, optimizer = self.run.config.train, self.run.config.optimizer
        step = make_train_step(
            self.objective,
            self.make_optimizer,
            parts=Parts(
                count=1 if self.run.pipeline is not None else config.accumulate,
                pin=pin,
                apart=apart_of(self.run, self.mesh, self._used),
            ),
            clips=optimizer.clip is not None,
            spikes=config.skip_spikes,
            update=update_in_turn(self.placement) if optimizer.offload == "host" else update_all,
            ema=config.ema,
        )
        shardings = self.shardings
        whole = self.placement.replicated()
        # With phases each replica has metrics of its own, [R].
        told = whole if self.phases is None else self.phases.replicas.lifted(whole)
        return jax.jit(
            step if self.phases is None else self.phases.step(step),
            in_shardings=(shardings, self.batch_shardings, whole),
            # The new state has the layout of the old one, the only one that the compiled step takes.
            out_shardings=(shardings, told),
            # The new state takes the memory of the old one.
            donate_argnums=0,
        )

    @functools.cached_property
    def exchanges(self) -> ExchangePrograms | None:
        """The programs of exchanges; None without phases."""
        return None if self.phases is None else ExchangePrograms(phases=self.phases, shapes=self.shapes, shardings=self.shardings)

    def compile_exchanges(self) -> Exchanges | None:
        """The compiled exchanges; None without phases."""
        return None if self.exchanges is None else self.exchanges.compiled()

    def lower_train_step(self) -> jax.stages.Lowered:
        """The step as XLA will compile it."""
        return self.train_step().lower(*self.step_shapes)

    def compile_train_step(self, lowered: jax.stages.Lowered | None = None) -> Any:
        """The compiled step. Raises InputError if its attention would mask wrongly."""
        if self.compiled is not None:
            return self.compiled
        compiled = (self.lower_train_step() if lowered is None else lowered).compile()
        if self.attention is not None and "segments" in self.element:
            _check_masks(self.run, self.attention.kernel, compiled)
        return compiled

    @property
    def step_shapes(self) -> tuple[Any, ...]:
        """The arguments of the step, as shapes."""
        return self.shapes, self.batch_shapes, jax.ShapeDtypeStruct((len(Settings._fields),), jnp.float32)

    def compile_eval_step(self, batch: int) -> Any:
        """The compiled evaluation of this many rows: (parameters, variables, batch) → by name, a sum and its weight."""
        whole, shapes = self.placement.replicated(), self.shapes
        params = shapes.params if self.phases is None else shapes.anchor
        # Only parameters may have other shapes in checkpoints.
        one, shardings = self.saved_of_one
        jitted = jax.jit(
            make_eval_step(self.objective),
            in_shardings=(self.stored.params, shardings.variables, self.batch_shardings),
            out_shardings=whole,
        )
        return jitted.lower(params, one.variables, rows_of(self.element, batch)).compile()


def rows_of(element: Mapping[str, jax.ShapeDtypeStruct], rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch of rows, [rows, ...] each."""
    return {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in element.items()}


def _check_masks(run: Run, kernel: AttentionKernel, compiled: Any) -> None:
    """Raises InputError if a device would mask its rows by those of others."""
    if kernel.has_foreign_mask is not None and kernel.has_foreign_mask(compiled.as_text() or ""):
        raise InputError(
            [
                f"{run.where('rules')}: inputs: the rules split the rows of attention, but not those of batch/segments, as cuDNN's kernel "
                "needs it with data.documents: mask. Split both over the same axes, or use model.attention: xla"
            ]
        )
