"""The training data: from the `data:` section of a run's YAML to batches of token ids.

Read `config.py` for the section's keys, then `batches.py`, which is the door: `open_data` returns `Data`, and `Data` yields
batches. Between the two, `sources.py` opens one source of the mixture. `files.py` finds its files. `tokens.py` maps files
that already contain token ids, and `mapped.py` notices if such a file changes while the run reads it. `documents.py` reads
text, which `encoded.py` sends through `tokenizer.py` once and keeps. All of them end in a `Stream` (`stream.py`): one sequence
of ids over many files.

The names below load on first use, so that a config is checked before JAX, numpy and Grain are imported.
"""

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
