"""The training data: from the `data:` section of a run's YAML to batches of token ids.

Read `config.py` for the section's keys, then `opening.py`, which is the door: `open_data` returns `Data` (`batches.py`), which yields
batches. Between the two, `sources.py` opens one source of the mixture. `files.py` finds its files. `tokens.py` maps files
that already contain token ids, `headers.py` knows them by their first bytes, and `mapped.py` notices if such a file changes while
the run reads it. `documents.py` and `columns.py` read text, out of files that `packed.py` unpacks; `encoded.py` sends it through
`tokenizer.py` once and keeps the ids. All of them end in a `Stream` (`stream.py`): one sequence of ids over many files. `boundaries.py`
marks where documents begin in a window, if they are to be masked from each other.

The names below load on first use, so that a config is checked before JAX, numpy and Grain are imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches import Data as Data
    from .config import DataConfig as DataConfig
    from .config import MixturePart as MixturePart
    from .config import path_problems as path_problems
    from .opening import open_data as open_data

_OWNERS = {
    "Data": ".batches",
    "open_data": ".opening",
    "DataConfig": ".config",
    "MixturePart": ".config",
    "path_problems": ".config",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(_OWNERS)
