"""Names for the places of a model: `context` names a region, `tensor` names one value, and `experts` calls experts by their numbers.

    with jgt.signal.context("mlp"):
        hidden = jgt.signal.tensor(jax.nn.relu(x @ up), "hidden")
        return hidden @ down

A model that calls these two functions knows no mesh, no rule and no spec; a YAML file says elsewhere what happens at
`mlp` and at `mlp/hidden`. A region is one of JAX's named scopes and a named value is a `checkpoint_name`, both of which survive
tracing and compilation. So a signal computes nothing, and the same name serves sharding, recompute policies, profiles and plans.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import TYPE_CHECKING, Any

import jax
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType]

from jgt.program.scopes import MICROBATCH, PREFIX, backward, trips

if TYPE_CHECKING:
    from jgt.replacements.experts.call import experts

__all__ = ["backward", "context", "experts", "per_microbatch", "tensor", "trips"]

# The others mean something in XLA's op names: `@` ends a name, a quote ends the attribute, and / ( ) : separate scopes and the names
# of operations that XLA combined.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class _Named(type):
    def __enter__(cls) -> None:
        raise TypeError("a region needs a name: with jgt.signal.context('mlp'):")

    __exit__ = __enter__


class context(contextlib.ContextDecorator, metaclass=_Named):  # noqa: N801 - it reads as a function
    """Names the region of a with-statement or of a decorated function. Regions nest: `attn` inside `layers` is `layers/attn`.

    Raises ValueError for a name with characters outside `[A-Za-z0-9_.-]`.
    """

    def __init__(self, name: str):
        self._name = _checked(name)
        # A stack, because one context may be entered again inside itself.
        self._open: list[contextlib.AbstractContextManager[object]] = []

    def _recreate_cm(self) -> context:
        # ContextDecorator calls this for each call of a decorated function, which may run in several threads at once.
        return context(self._name)

    def __enter__(self) -> None:
        scope = jax.named_scope(PREFIX + self._name)
        scope.__enter__()
        self._open.append(scope)

    def __exit__(self, *error: object) -> None:
        self._open.pop().__exit__(*error)  # pyright: ignore[reportArgumentType]


def tensor(x: jax.Array, name: str) -> jax.Array:
    """Names one value of any shape inside its region, and returns it unchanged.

    Raises ValueError for a name with characters outside `[A-Za-z0-9_.-]`.
    """
    return checkpoint_name(x, _checked(name))


def per_microbatch() -> contextlib.AbstractContextManager[object]:
    """A region whose values may be computed from the rows at hand: in a pipeline, from one microbatch on one data shard.

    It is the in-model form of `pipeline.per_microbatch`. The scales of eight-bit matmuls are an example: any rows will do for them.
    """
    return jax.named_scope(MICROBATCH)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Only a model with experts loads what a call of them is. Read from there, the call has no line of its own in this file.
        if name != "experts":
            raise AttributeError(f"module 'jgt.signal' has no attribute {name!r}")
        return importlib.import_module("jgt.replacements.experts.call").experts


def _checked(name: object) -> str:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        allowed = "Use letters, digits, underscores, dots and dashes; nest contexts instead of writing a/b"
        what = repr(name) if isinstance(name, str) else f"a value of type {type(name).__name__}"
        raise ValueError(f"{what} is not a valid signal name. {allowed}. The name comes last: signal.tensor(x, 'name')")
    return name
