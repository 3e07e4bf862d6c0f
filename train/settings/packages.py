"""The optional packages of a run, and the loggers that need one. Finds out whether they are installed, and imports none."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal

LoggerName = Literal["jsonl", "tensorboard", "csv", "wandb", "mlflow"]
_PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""The package that a logger needs. The extra of the logger's name installs it."""


def missing_loggers(names: Sequence[str]) -> list[str]:
    """The loggers among these whose package is not installed."""
    return [name for name in dict.fromkeys(names) if name in _PACKAGES and not is_installed(_PACKAGES[name])]


def logger_problem(name: str) -> str:
    """The message about a logger that is not installed."""
    return f"{name} needs the package {_PACKAGES[name]}. Install it (pip install 'jgt[{name}]'), or take {name} out of the list"


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name, as wandb makes one in the working directory, is not the package.
    return spec is not None and spec.origin is not None
