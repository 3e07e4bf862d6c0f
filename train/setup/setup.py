"""A run before its first step: the shapes of its state, where everything goes, and its compiled functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.document import InputError
from jgt.planner import has_foreign_mask

from ..config import Run
from ..step.objective import Objective
from ..step.optimizer import MakeOptimizer, Settings, settings_of_step
from ..step.state import State
from ..step.step import make_eval_step, make_train_step
from ..step.sync.phases import ExchangePrograms, Exchanges
from ..step.update import update_all, update_in_turn
from .program import ModelProgram, rows_of
from .state import COMPILED_ONCE, StateLayout


@dataclass(frozen=True, kw_only=True)
class Setup(StateLayout):
    """A run's parts, their shapes and where they go; built by `prepare`, nothing allocated.

    make_state: makes the state before the first step from a seed, uint32[]. It is one function, so that JAX traces it once. objective: the
    loss of parameters as the state has them. compiled: the step, if it is compiled already.
    """

    run: Run
    mesh: Mesh | AbstractMesh
    program: ModelProgram
    make_optimizer: MakeOptimizer
    objective: Objective
    make_state: Callable[[jax.Array], State]
    compiled: Any = None

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch."""
        return rows_of(self.program.element, self.run.config.train.batch)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Where each array of a batch goes."""
        return self.storage.model.inputs(self.batch_shapes)

    @property
    def row_order(self) -> np.ndarray | None:
        """The position int32[seq] of each token of a row as the step reads it; None for rows in their own order."""
        if "positions" not in self.program.element:
            return None
        n = self.mesh.shape[self.run.rules.contexts[0].axis]
        positions = np.arange(self.program.element["positions"].shape[-1], dtype=np.int32).reshape(2 * n, -1)
        # Device i has the parts i and 2n - 1 - i.
        return positions[[part for i in range(n) for part in (i, 2 * n - 1 - i)]].reshape(-1)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(map(self._num_elements, self.storage.model.parameters))

    @property
    def num_frozen(self) -> int:
        """Parameters that are not trained."""
        return sum(self._num_elements(p) for p in self.storage.model.parameters if not self.trained.has(p.path))

    def _num_elements(self, parameter: Any) -> int:
        adapters = self.program.adapters
        packing = None if adapters is None else adapters.packing_of(parameter.path)
        return math.prod(parameter.shape if packing is None else packing.unpacked(parameter.shape))

    def init(self) -> State:
        """The state before the first step, born sharded; the same values on every mesh."""
        # The seed is an argument. As a constant it would make another program of each seed, and the compilation cache would miss.
        return jax.jit(self.make_state, out_shardings=self.shardings, compiler_options=COMPILED_ONCE)(np.uint32(self.run.config.run.seed))

    def settings(self, step: int) -> np.ndarray:
        """The settings of a step, f32[3]: the third argument of the compiled step."""
        return settings_of_step(self.run.config.optimizer, self.run.steps, step)

    def with_epochs(self, samples_of_epoch: int | None, step: int = 0, samples: int = 0) -> Setup:
        """The setup with the number of steps that `train.epochs` makes, for a run that has taken `step` steps and read `samples` samples.

        The last step completes the last epoch, whatever batches the steps so far had.
        """
        train = self.run.config.train
        if train.epochs is None:
            return self
        if samples_of_epoch is None:
            where = f"{self.run.where('train.epochs')}: train.epochs"
            raise InputError([f"{where}: the length of a stream is unknown, so epochs cannot be counted. Set train.steps instead"])
        left = math.ceil(train.epochs * samples_of_epoch) - samples
        return replace(self, run=replace(self.run, epoch_steps=max(step - (-left // train.batch), 1)))

    def train_step(self) -> jax.stages.Wrapped:
        """The step under jax.jit: (state, batch, settings) → (state, metrics). The state's buffers are donated."""
        step = make_train_step(
            self.objective,
            self.make_optimizer,
            gradients=self.gradients,
            clips=self.run.config.optimizer.clip is not None,
            features=self.features,
            update=update_in_turn(self.storage) if self.offload else update_all,
        )
        shardings, whole = self.shardings, self.storage.model.replicated()
        return jax.jit(
            step if self.phases is None else self.phases.step(step),
            in_shardings=(shardings, self.batch_shardings, whole),
            # The new state has the layout of the old one, the only one that the compiled step takes. With phases each replica has metrics.
            out_shardings=(shardings, whole if self.phases is None else self.phases.replicas.lift(whole)),
            # The new state takes the memory of the old one.
            donate_argnums=0,
        )

    @functools.cached_property
    def exchanges(self) -> ExchangePrograms | None:
        """The programs of exchanges; None without phases."""
        return None if self.phases is None else ExchangePrograms(phases=self.phases, shapes=self.shapes, shardings=self.shardings)

    def compile_exchanges(self) -> Exchanges | None:
        """The compiled exchanges; None without phases."""
        return None if self.exchanges is None else self.exchanges.compile()

    def lower_train_step(self) -> jax.stages.Lowered:
        """The step as XLA will compile it."""
        return self.train_step().lower(*self.step_shapes)

    def compile_train_step(self, lowered: jax.stages.Lowered | None = None) -> Any:
        """The compiled step. Raises InputError if a device would mask its rows by other rows."""
        if self.compiled is not None:
            return self.compiled
        compiled = (self.lower_train_step() if lowered is None else lowered).compile()
        attention = self.program.attention
        has_mask = attention is not None and attention.kernel.splits_mask and "segments" in self.program.element
        if has_mask and has_foreign_mask(compiled.as_text() or ""):
            why = (
                "the rules split the rows of attention, but not those of batch/segments, as cuDNN's kernel needs it for "
                "masked documents and packed conversations. Split both over the same axes, or use model.attention: xla"
            )
            raise InputError([f"{self.run.where('rules')}: inputs: {why}"])
        return compiled

    @property
    def step_shapes(self) -> tuple[State, dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        """The arguments of the step, as shapes."""
        return self.shapes, self.batch_shapes, jax.ShapeDtypeStruct((len(Settings._fields),), jnp.float32)

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """The names of what an evaluation computes, of which `loss` is one."""
        return tuple(self.eval_shapes(self.run.config.train.batch))

    def eval_shapes(self, batch: int) -> dict[str, object]:
        """The shapes of what an evaluation of this many rows computes. Raises InputError if its program cannot be traced."""
        rows, params = rows_of(self.program.element, batch), self.last_params(self.shapes)
        return jax.eval_shape(make_eval_step(self.objective), params, self.saved_of_one[0].variables, rows)

    @property
    def eval_multiple(self) -> int:
        """The rows of a batch of an evaluation are a multiple of this: on each device that splits the batch, of the microbatches."""
        batch, places = self.run.config.train.batch, self.batch_shardings
        shards = max(batch // places[name].shard_shape(x.shape)[0] for name, x in self.batch_shapes.items())
        return shards * (1 if self.run.pipeline is None else self.run.pipeline.microbatches)

    def compile_eval_step(self, batch: int) -> jax.stages.Compiled:
        """The compiled evaluation of this many rows: (parameters, variables, batch) → a sum and its weight, by name."""
        whole, params = self.storage.model.replicated(), self.last_params(self.shapes)
        # Only parameters may have other shapes in checkpoints.
        one, shardings = (state.variables for state in self.saved_of_one)
        jitted = jax.jit(
            make_eval_step(self.objective),
            in_shardings=(self.storage.placement.params, shardings, self.batch_shardings),
            out_shardings=whole,
        )
        return jitted.lower(params, one, rows_of(self.program.element, batch)).compile()
