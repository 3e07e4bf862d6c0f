"""The only door from jgt to the trainer, the package `train` that is installed beside jgt.

`train` is also what half of all projects call their own script or folder. Where one of those is found first, `import train` would run the
user's file in place of the trainer. So the trainer is loaded by its path and never by searching for its name. It is called `train` where
that name leads to it anyway, and `jgt._train` where the name is the user's. Both work, because the trainer's own imports are relative.

The invariant: a process has at most one copy of the trainer, so that a class of it is one class.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent.parent.parent / "train"
_NAMES = ("train", "jgt._train")
# The trainer may itself ask for a module of it while it is loaded.
_LOCK = threading.RLock()


def trainer(module: str = "") -> ModuleType:
    """A module of the trainer, by its name there: `trainer("run.train")`. Without a name, the package. Raises ImportError."""
    package = _package()
    return importlib.import_module(f"{package}.{module}" if module else package)


def run(config: Any, overrides: str | Sequence[str] = (), **parts: Any) -> Any:
    """Trains a run in this process and returns its state, its metrics and its folder: `run_here` in train/run/api.py.

        result = jgt.run("configs/quickstart.yaml", ["train.steps=50"])

    config: a run's file, or its contents as a mapping.
    overrides: as on the command line.
    parts: `model`, `loss`, `optimizer`, `data`, `transform` and `hooks` as objects; `code`, `resume`, `allow_change` and `allow_command` as
    the options of `jgt train`.

    Raises InputError with every problem of the config.
    """
    return trainer("run.api").run_here(config, overrides, **parts)


def load(path: str | Path, overrides: str | Sequence[str] = (), **parts: Any) -> Any:
    """The model of a run directory, of one of its checkpoints or of a folder of Hugging Face: `load_model` in train/run/load.py.

        model = jgt.load("runs/quickstart")

    path: a folder, or its URL in a bucket.
    overrides: changes of the run's config.
    parts: `model`, `loss`, `data`, `transform` and `code` as for `run`; `mesh` and `rules`: the layout of the arrays, which are whole on
    one device otherwise; `sharded`: whether they are laid out as the run's; `adapters`: folders of PEFT by names.

    Raises InputError, also without a checkpoint.
    """
    return trainer("run.load").load_model(path, overrides, **parts)


def _package() -> str:
    """The name under which the trainer is loaded. Loads it if it is not."""
    with _LOCK:
        for name in _NAMES:
            if (loaded := sys.modules.get(name)) is not None and _is_ours(loaded.__file__):
                return name
        if not _FOLDER.is_dir():
            raise ImportError(f"the trainer is missing: it is installed beside jgt, in {_FOLDER}. Install jgt again")
        name = _NAMES[0] if _is_name_free() else _NAMES[1]
        spec = spec_from_file_location(name, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
        assert spec is not None and spec.loader is not None
        package = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
        return name


def _is_name_free() -> bool:
    """Whether `import train` would find the trainer, or nothing. Otherwise the name belongs to the user's own file or folder."""
    if _NAMES[0] in sys.modules:
        return False
    found = find_spec(_NAMES[0])
    return found is None or _is_ours(found.origin)


def _is_ours(file: str | None) -> bool:
    # A package without __init__.py, such as a folder of data, has no file.
    return file is not None and Path(file).resolve() == (_FOLDER / "__init__.py").resolve()
