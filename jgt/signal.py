"""Names for the places of a model: `context` names a region, `tensor` one value. Nothing else.

A region is a named scope and a value a checkpoint name, so a signal costs nothing, needs no rules and no mesh, and
the same name serves sharding, recompute policies, profiles and plans.
"""

from __future__ import annotations

import contextlib
import re

import jax
from jax.ad_checkpoint import checkpoint_name

PREFIX = "sig."
"""Marks signals among other named scopes (Flax adds its own) in name stacks and in the compiled program."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class context(contextlib.ContextDecorator):  # noqa: N801 - it reads as a function
    """Names the region of a with-statement, or all of a decorated function. Regions nest: `layers/attn`.

    Raises ValueError for a name outside `[A-Za-z0-9_.-]`.
    """

    def __init__(self, name: str):
        self._name = _checked(name)
        self._open: list[contextlib.AbstractContextManager[object]] = []

    def _recreate_cm(self) -> context:
        # A decorated function may run in several threads at once: each call has a context of its own.
        return context(self._name)

    def __enter__(self) -> None:
        scope = jax.named_scope(PREFIX + self._name)
        scope.__enter__()
        self._open.append(scope)

    def __exit__(self, *error: object) -> None:
        self._open.pop().__exit__(*error)  # pyright: ignore[reportArgumentType]


def tensor(x: jax.Array, name: str) -> jax.Array:
    """Names one value (of any shape) inside its region and returns it unchanged.

    Raises ValueError for a name outside `[A-Za-z0-9_.-]`.
    """
    return checkpoint_name(x, _checked(name))


def _checked(name: str) -> str:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(f"{name!r} is no signal name. Allowed are letters, digits and _ . -; nest contexts instead of writing a/b")
    return name
