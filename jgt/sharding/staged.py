"""The interface of a pipeline: an object that puts a call into stages.

`jgt.Pipeline` is such an object. `jgt.sharding` receives it with a call and imports nothing of pipelines: a call without one needs no
schedule, no microbatches and no proof about the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jgt.replacements.replacement import ParameterPlace, Replacement
from jgt.rules import Rules
from jgt.sharding.arguments import Arguments, Traced
from jgt.sharding.placement import CallContext
from jgt.sharding.storage import Form

Run = Callable[[Sequence[jax.Array]], list[jax.Array]]
"""From the arrays of a call, in order, to its results."""


@dataclass(frozen=True, kw_only=True)
class StoredCall:
    """A call whose stacks of layers are stored on their stages. form_of: the stored form of such a stack, None for other parameters."""

    form_of: Callable[[ParameterPlace], Form | None]
    run: Run


@dataclass(frozen=True, kw_only=True)
class StagedCall:
    """A call whose layers a pipeline runs: its parameters' places, and how to run it on the argument arrays.

    stored: the same for parameters that are stored on their stages, if they can be and are not.
    """

    parameters: tuple[ParameterPlace, ...]
    run: Run
    stored: StoredCall | None = None


class Staging(Protocol):
    """A pipeline. signal: the signal of the layers that it runs. axis: the mesh axis of its stages."""

    @property
    def signal(self) -> str:
        """The signal of the layers that the stages share."""
        ...

    @property
    def axis(self) -> str:
        """The mesh axis of the stages."""
        ...

    def stage(
        self,
        arguments: Arguments,
        traced: Traced,
        rules: Rules,
        site: CallContext,
        replacements: Sequence[Replacement],
        parameters: tuple[ParameterPlace, ...],
    ) -> StagedCall:
        """Puts a call with this trace into the pipeline. Raises InputError, and ValueError where a pipeline cannot be called."""
        ...
