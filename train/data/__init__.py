"""Token streams, their windows and their batches. Names load on first use, so that a config is checked before JAX is imported."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.batches import Data as Data
    from train.data.batches import open_data as open_data
    from train.data.config import DataConfig as DataConfig
    from train.data.config import MixturePart as MixturePart
    from train.data.config import path_problems as path_problems

_OWNERS = {
    "Data": "train.data.batches",
    "open_data": "train.data.batches",
    "DataConfig": "train.data.config",
    "MixturePart": "train.data.config",
    "path_problems": "train.data.config",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted(_OWNERS)
