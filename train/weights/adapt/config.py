"""The `lora:` section. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from jgt.document import Bound

from ...files.bucket import PathOrUrl
from ...settings.numbers import Positive
from ...settings.sections import OTHER_WORDS


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The `lora:` section: low-rank updates of a model's matrices, which are trained in their place (arXiv 2106.09685).

    rank: the rank of an update.
    alpha: an update counts alpha / rank times.
    modules: patterns of modules or of parameters; those of their matrices that a matmul reads are adapted.
    dropout: the share of what an update reads that is dropped in training.
    stabilized: whether an update counts alpha / √rank times instead (rsLoRA, arXiv 2312.03732).
    hf: a folder, or its URL, with [an adapter of PEFT](finetune.md#adapters-as-files) for `model.hf`, which a new run begins with. It gives
    the other keys.
    """

    WORDS = OTHER_WORDS
    rank: Annotated[int, Bound(low=1, high=100_000)] = 16
    alpha: Positive = 32.0
    modules: tuple[str, ...] = ("{q,k,v}_proj", "out")
    dropout: Annotated[float, Bound(low=0, high=0.99)] = 0.0
    stabilized: bool = False
    hf: PathOrUrl | None = None

    @property
    def scale(self) -> float:
        """The factor of an update."""
        return self.alpha / (self.rank**0.5 if self.stabilized else self.rank)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Patterns of which there have to be some."""
        if not self.modules:
            yield "modules", "[] adapts nothing. Name modules, such as '{q,k,v}_proj', or remove the section"
