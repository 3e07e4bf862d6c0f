"""A model of the user's own, by the name that the config gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jgt.document import InputError

from ..code.files import Code
from ..code.names import call_with, load_object
from ..models.config import OwnModel
from ..models.linear import compute_type
from ..models.model import Model, of_flax


def own_model(config: OwnModel, code: Code, where: Callable[[str], str], call: Callable[[Any], Any]) -> Model:
    """The model. where(key): file and line of a key of the config. call: see `of_flax`. Raises InputError."""
    target = load_object(config.kind, "model.kind", code, where("model.kind"))
    offered = {"vocab": config.vocab, "seq": config.seq, "dtype": compute_type(config)}

    def place(key: str) -> str:
        return f"{where(f'model.{key}')}: model.{key}"

    def make(rngs: Any) -> Any:
        return call_with(target, config.arguments, {**offered, "rngs": rngs}, lambda key: place(key or "kind"))

    try:
        return of_flax(make, call)
    except TypeError as error:
        raise InputError([f"{place('kind')}: {config.kind}: {error}"]) from error
