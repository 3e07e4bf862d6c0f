"""The compilation of a run's step, beside which its state is found."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from ..settings.formats import duration_text
from ..setup import Setup
from .session import Session

_QUICK_SECONDS = 5.0
"""A compilation that takes longer is announced."""


class Compiling:
    """The step, compiled by a thread. Only XLA works there: the trace is finished when `begin` returns."""

    def __init__(self, setup: Setup, session: Session):
        self._setup, self._session = setup, session
        self._future: Future[jax.stages.Compiled] | None = None

    def begin(self) -> None:
        """Traces the step, and compiles it from then on, unless that has begun."""
        if self._future is not None:
            return
        self._begun = time.perf_counter()
        with self._session.phase("trace"):
            lowered = None if self._setup.compiled is not None else self._setup.lower_train_step()
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        try:
            self._future = pool.submit(self._setup.compile_train_step, lowered)
        finally:
            pool.shutdown(wait=False)

    def result(self) -> jax.stages.Compiled:
        """The compiled step, which has begun. Says when it takes long."""
        assert self._future is not None
        if not wait([self._future], _QUICK_SECONDS).done:
            say = self._session.screen.say
            say("Compiling the step ...")
            self._future.result()
            say(f"Compiled the step in {duration_text(time.perf_counter() - self._begun)}")
        return self._future.result()
