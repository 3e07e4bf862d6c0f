"""The programs by which replicas agree, and the steps after which each of them runs.

With `overlap: 3` the replicas continue for 3 steps with what they have, and then take over what the exchange has found: their own
parameters count by `blend`, the exchanged ones by the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ..step.step import State
from .config import SyncConfig
from .fragments import Fragment, fragments_of
from .phases import Phases


@dataclass(frozen=True, kw_only=True)
class ExchangePrograms:
    """Exchanges of a run with phases, under jax.jit: state → state each, whose buffers are donated. shapes, shardings: of the state."""

    phases: Phases
    shapes: State
    shardings: State

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments in which parameters are exchanged."""
        return self._fragments(self.phases.config.fragments)

    def exchange(self, part: int | None = None) -> Any:
        """The exchange of all parameters, or of one fragment by its number."""
        takes = part is None or self.phases.config.overlap == 0
        fragment = self._fragments(1)[0] if part is None else self.fragments[part]
        return self._jitted(functools.partial(self.phases.exchanged, shardings=self.shardings.anchor, fragment=fragment, takes=takes))

    def take(self, part: int) -> Any:
        """The replicas take over a fragment that was exchanged before."""
        return self._jitted(functools.partial(self.phases.taken, fragment=self.fragments[part]))

    def compiled(self) -> Exchanges:
        """All programs that a run needs."""
        sync, whole = self.phases.config, self._compiled(self.exchange())
        numbers = range(sync.fragments)
        is_whole = sync.fragments == 1 and sync.overlap == 0
        parts = [whole] if is_whole else [self._compiled(self.exchange(part)) for part in numbers]
        takes = [self._compiled(self.take(part)) for part in numbers] if sync.overlap else []
        return Exchanges(sync=sync, whole=whole, parts=tuple(parts), takes=tuple(takes))

    def _fragments(self, count: int) -> tuple[Fragment, ...]:
        return fragments_of(self.shapes.anchor, self.shardings.anchor, count)

    def _jitted(self, run: Callable[[State], State]) -> Any:
        return jax.jit(run, in_shardings=(self.shardings,), out_shardings=self.shardings, donate_argnums=0)

    def _compiled(self, program: Any) -> Any:
        return program.lower(self.shapes).compile()


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The compiled programs, state → state each.

    whole: of all parameters. parts: of each fragment. takes: with `overlap`, by which replicas take a fragment over.
    """

    sync: SyncConfig
    whole: Callable[[Any], Any]
    parts: tuple[Callable[[Any], Any], ...]
    takes: tuple[Callable[[Any], Any], ...] = ()

    def after(self, state: Any, step: int, *, is_last: bool, since: int) -> tuple[Any, bool]:
        """The state after the exchanges that are due after a step, and whether all replicas are equal now.

        is_last: of the run, which ends with a whole exchange. since: the last step after which all replicas were equal.
        """
        if is_last:
            return self.whole(state), True
        for part in due(self.sync, step - self.sync.overlap) if self.takes else ():
            # What was exchanged before the replicas were made equal is in all of them.
            if step - self.sync.overlap > since:
                state = self.takes[part](state)
        parts = list(due(self.sync, step))
        for part in parts:
            state = self.parts[part](state)
        return state, bool(parts) and len(self.parts) == 1 and not self.takes


def due(sync: SyncConfig, step: int) -> Iterator[int]:
    """The fragments that are exchanged after a step. The last one is exchanged at the end of a phase."""
    for part in range(sync.fragments):
        if step > 0 and (step - sync.every * (part + 1) // sync.fragments) % sync.every == 0:
            yield part
