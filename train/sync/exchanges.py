"""The programs by which replicas agree, and the steps after which each of them runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ..step.state import State
from .config import SyncConfig
from .fragments import Fragment, fragments_of
from .phases import Phases


@dataclass(frozen=True, kw_only=True)
class ExchangePrograms:
    """Exchanges of a run with phases, under jax.jit: state → state each, whose buffers are donated. shapes, shardings: the state's."""

    phases: Phases
    shapes: State
    shardings: State

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments in which parameters are exchanged."""
        return self._fragments(self.phases.config.fragments)

    def exchange(self, part: int | None = None) -> Any:
        """The exchange of all parameters, or of one fragment by its number."""
        fragment = self._fragments(1)[0] if part is None else self.fragments[part]
        run = functools.partial(self.phases.exchange, shardings=self.shardings.anchor, fragment=fragment)
        return jax.jit(run, in_shardings=(self.shardings,), out_shardings=self.shardings, donate_argnums=0)

    def compile(self) -> Exchanges:
        """All programs that a run needs."""
        count, whole = self.phases.config.fragments, self._compile(None)
        parts = [whole] if count == 1 else [self._compile(part) for part in range(count)]
        return Exchanges(sync=self.phases.config, whole=whole, parts=tuple(parts))

    def _fragments(self, count: int) -> tuple[Fragment, ...]:
        return fragments_of(self.shapes.anchor, self.shardings.anchor, count)

    def _compile(self, part: int | None) -> Any:
        return self.exchange(part).lower(self.shapes).compile()


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The compiled programs, state → state each. whole exchanges all parameters, and each of `parts` one fragment."""

    sync: SyncConfig
    whole: Callable[[State], State]
    parts: tuple[Callable[[State], State], ...]

    def after(self, state: State, step: int, *, is_last: bool) -> tuple[State, bool]:
        """The state after the exchanges that are due after a step, and whether all replicas are equal now.

        is_last: whether the step is the run's last, which ends with a whole exchange.
        """
        if is_last:
            return self.whole(state), True
        due = list(due_fragments(self.sync, step))
        for part in due:
            state = self.parts[part](state)
        return state, bool(due) and len(self.parts) == 1


def due_fragments(sync: SyncConfig, step: int) -> Iterator[int]:
    """The fragments that are exchanged after a step. The last one is exchanged at the end of a phase."""
    for part in range(sync.fragments):
        if step > 0 and (step - sync.every * (part + 1) // sync.fragments) % sync.every == 0:
            yield part
