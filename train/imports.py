"""Imports with the garbage collector at rest: modules are a million objects that stay, and it would look at them again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Import inside. What there is at the end, the garbage collector leaves alone from then on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
