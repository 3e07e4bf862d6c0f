"""The `optimizer:` section. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from jgt.document import Node

from ..settings.code.names import OR_OWN, is_name
from ..settings.numbers import Fraction, Natural, NotNegative, Positive
from ..settings.sections import OTHER_WORDS

MAX_BF16_DECAY = 0.99
"""The slowest decay of a moment that is stored in bf16: 1 - 0.99 is more than twice the 2^-8 that rounding may take away."""


@dataclass(frozen=True, kw_only=True)
class _RateKeys:
    """The keys that every optimizer has: the learning rate and its schedule, weight decay, clipping.

    lr: the peak learning rate, for both optimizers.
    schedule: the learning rate after warm-up. cosine: falls to `final_lr · lr` by the end of the run, along a cosine. wsd
    (warmup-stable-decay): stays at `lr`, then falls linearly to `final_lr · lr` over the last share `decay` of the steps (arXiv
    2404.06395). constant: stays at `lr`.
    warmup: steps of linear warm-up.
    decay: for wsd: the share of `train.steps`, at the end of the run, during which the learning rate falls.
    final_lr: for cosine and wsd: the learning rate at the end of the run, as a share of `lr`.
    weight_decay: decoupled weight decay.
    clip: clips the gradient to this global norm; null: no clipping.
    train: patterns of the parameters that are trained; the others are [frozen](#frozen-parameters). null: all are trained.
    gradients: the type in which devices add up the gradients of matrices and tables. null: without a pipeline that of matmuls
    (`model.dtype`), in a pipeline f32. bf16 needs `model.dtype: bf16`. In a pipeline microbatches are added up in f32 in any case, and so
    are the parts of `train.accumulate`; devices add up theirs [once a step](scaling.md#gradient-accumulation). Gradients of norms are
    always f32.
    """

    lr: Positive = 3e-4
    schedule: Annotated[Literal["cosine", "wsd", "constant"], "Another one is part of an optimizer of your own (docs/own.md)"] = "cosine"
    warmup: Natural = 0
    decay: Fraction = 0.2
    final_lr: Fraction = 0.1
    weight_decay: NotNegative = 0.1
    clip: Positive | None = 1.0
    train: tuple[str, ...] | None = None
    gradients: Literal["f32", "bf16"] | None = None


@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(_RateKeys):
    """An optimizer of the user's own: a function that returns an optax transformation.

    Its arguments `learning_rate` and `weight_decay`, if it has them, are arguments of the compiled step.

    name: MODULE:NAME of the function.
    arguments: all further keys.
    """

    REST: ClassVar[str] = "arguments"
    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    moments: ClassVar[str] = "f32"
    offload: ClassVar[str] = "none"

    def problems(self) -> Iterator[tuple[str, str]]:
        """The argument that `lr` and its schedule are passed as."""
        if "learning_rate" in self.arguments:
            yield "learning_rate", "the run passes it, from lr, schedule and warmup. Rename the key to lr"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_RateKeys):
    """The `optimizer:` section: AdamW (arXiv 1711.05101) or Muon (arXiv 2502.16982), with warm-up and a learning rate schedule.

    name: adamw: AdamW for all parameters. muon: Muon for the matrices of the layers, and AdamW for the rest (embedding, head, norms,
    biases, learned positions). Norms, biases and learned positions have no weight decay.
    b1: AdamW's β₁.
    b2: AdamW's β₂.
    eps: AdamW's ε.
    momentum: Muon's Nesterov momentum. `b1`, `b2` and `eps` apply to the AdamW parameters.
    moments: the type in which moments are stored between updates, for both optimizers; updates are computed in f32. With bf16 the decays
    (`b1`, `b2`, `momentum`) are at most 0.99.
    offload: host: store moments in host memory between updates, and copy them to the device one parameter at a time.
    """

    WORDS = OTHER_WORDS
    name: Annotated[Literal["adamw", "muon"], OR_OWN] = "adamw"
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Positive = 1e-8
    momentum: Fraction = 0.95
    moments: Literal["f32", "bf16"] = "f32"
    offload: Literal["none", "host"] = "none"

    @staticmethod
    def variant(node: Node) -> type:
        """The class of the section, by its `name`."""
        return OwnOptimizer if is_name(node.find("name").value) else OptimizerConfig

    def problems(self) -> Iterator[tuple[str, str]]:
        """Moments in bf16, which has 8 bits of precision, cannot follow changes of less than half a unit in the last place."""
        # AdamW ignores `momentum`, whose default must then not be judged.
        slow = ("momentum", "b1", "b2") if self.name == "muon" else ("b1", "b2")
        for key in slow if self.moments == "bf16" else ():
            value = getattr(self, key)
            if value > MAX_BF16_DECAY:
                yield (
                    key,
                    (
                        f"{value:g} changes a moment by {1 - value:.2g} of itself in a step, but rounding to bf16 takes away up to 0.004. "
                        f"Use at most {MAX_BF16_DECAY:g}, or optimizer.moments=f32"
                    ),
                )
