"""A line in the cell of a notebook that is replaced by the next one, for the steps of a run.

A notebook stores all that a cell prints, in its file too, so a run that prints each step makes it slow and long. A display that has a name
can be replaced. The browser needs a moment for each, so a line that comes soon after another is held back, and shown only if none follows:
`end_line` shows the last line and leaves it there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 0.2
"""The least time between two lines on the screen."""


class Notebook:
    """The cell that runs at the moment. display: IPython's function."""

    def __init__(self, display: Callable[..., Any]):
        self._display = display
        self._handle: Any = None
        self._waiting: str | None = None
        self._shown_at = 0.0

    def show_line(self, line: str) -> None:
        """Shows a line in place of the one before it, now or with one of the next calls."""
        self._waiting = line
        if time.monotonic() - self._shown_at >= _SECONDS:
            self._show()

    def end_line(self) -> None:
        """The line that was given last stays; the next one begins below."""
        if self._waiting is not None:
            self._show()
        self._handle = None

    def _show(self) -> None:
        data = {"text/plain": self._waiting}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._waiting, self._shown_at = None, time.monotonic()


def find_notebook() -> Notebook | None:
    """The notebook that this process is the kernel of, if it is one."""
    # A kernel has imported IPython long before.
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return Notebook(ipython.display.display)
