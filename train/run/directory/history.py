"""The configs of a run: config.yaml is the one that trains, and `configs/` keeps each one that trained before it.

A run may be started with other values than before. Overwriting the config would lose the values that the steps so far were trained with. So
a start that trains copies the former config to `configs/` before it replaces it, under the step at which the values changed, and reports
each changed key. The identity of the data, data.json, is kept beside it.

The invariant: a start that trains no step changes no file here, and a kill at any moment loses no config.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jgt import document
from jgt.document import Node, shown

from ...checkpoint.steps import remove
from ...config import Run
from ...data.config import DataConfig
from ...files.disk import write_whole
from ...settings.code.files import COPY, Code
from ...weights.origin import keep_origin
from .folder import CONFIG, CONFIGS, DATA
from .identity import Change, code_of

_FREE = ("mesh", "rules", "pipeline", "budget", "hooks")
"""Parts of a config whose keys are the user's own. In all others, a key that an older file lacks did not exist then."""
_MAX_SHOWN = 12
_MAX_VALUE = 60
_MISSING = "(none)"


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """The changes of a start to the config of its run.

    step: the step from which the new values hold. changes: (key, before, after). kept: where the former config is, relative to the run.
    """

    step: int
    changes: tuple[Change, ...]
    kept: str

    @property
    def text(self) -> str:
        """A line for each key."""
        lines = [f"  {key}: {_short(old)} -> {_short(new)}" for key, old, new in self.changes]
        more = [] if len(lines) <= _MAX_SHOWN else [f"  and {len(lines) - _MAX_SHOWN} more; see {self.kept}"]
        return "\n".join([f"Config changes at step {self.step}:", *lines[:_MAX_SHOWN], *more])

    def to_json(self) -> dict[str, object]:
        """The details of its event."""
        return {"step": self.step, "changes": {key: [old, new] for key, old, new in self.changes}, "kept": self.kept}


def replace_config(run: Run, data: Mapping[str, object], step: int) -> ConfigChange | None:
    """Writes the config and the identity of the data of a start that trains from `step` on. None if both are as before.

    What they replace is kept. Raises OSError.
    """
    folder = run.config.run.path
    texts = config_texts(run, data)
    before = {name: path.read_text() for name in texts if (path := folder / name).is_file()}
    if before == texts:
        return None
    new = Node.of(run.resolved(), CONFIG).plain()
    old = document.read(folder / CONFIG).plain() if CONFIG in before else new
    name = f"step-{step}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    (folder / CONFIGS).mkdir(exist_ok=True)
    for file, text in before.items():
        # The config always, because it names what the steps so far were trained with; the data only if it differs.
        if file == CONFIG or text != texts[file]:
            _keep(folder / CONFIGS / f"{name}{Path(file).suffix}", text)
    for file, text in texts.items():
        write_whole(folder / file, text)
    changes = [*_changes((), old, new), *_data_changes(before.get(DATA), data)]
    return ConfigChange(step=step, changes=tuple(changes), kept=f"{CONFIGS}/{name}.yaml") if changes else None


def config_texts(run: Run, data: Mapping[str, object]) -> dict[str, str]:
    """The files of a run directory that describe the run, by name."""
    return {CONFIG: document.dump(run.resolved()), DATA: json.dumps(dict(data), indent=1) + "\n"}


def begin_folder(run: Run, fingerprint: Mapping[str, object]) -> None:
    """Creates the run directory, and writes the files that describe the run unless an earlier start has. Raises OSError."""
    folder = run.config.run.path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in config_texts(run, fingerprint).items():
        if not (folder / name).exists():
            write_whole(folder / name, text)
    _keep_code(run.code, folder)
    data = run.config.data
    parts = data.parts() if isinstance(data, DataConfig) else ()
    template = next((part.template for part in parts if part.template != "auto"), None)
    keep_origin(folder, getattr(run.config.model, "hf", None), getattr(data, "tokenizer_name", None), template)


def _keep_code(code: Code, folder: Path) -> None:
    """Copies the user's own code into the run directory. An earlier copy of other code stays, under a number."""
    if not code.files or code_of(folder) == code.checksum:
        return
    new = folder / f"{COPY}.new"
    remove(new)
    # If a file cannot be copied, the earlier copy stays.
    code.copy(new)
    if (folder / COPY).is_dir():
        earlier = (folder / f"{COPY}.{number}" for number in itertools.count(1))
        (folder / COPY).rename(next(path for path in earlier if not path.exists()))
    new.rename(folder / COPY)


def _keep(path: Path, text: str) -> None:
    # Two starts in one second are tests or accidents; neither loses a config.
    number = 1
    while path.exists() or path.is_symlink():
        number += 1
        path = path.with_name(f"{path.stem.partition('.')[0]}.{number}{path.suffix}")
    write_whole(path, text)


def _changes(path: tuple[str, ...], old: object, new: object) -> Iterator[Change]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        # A run that is older than hooks had none.
        if old != new and (old, new) != (None, {}):
            yield ".".join(path), old, new
        return
    for key in dict.fromkeys((*old, *new)):
        inner = (*path, str(key))
        if key in old or inner[0] in _FREE:
            yield from _changes(inner, old.get(key), new.get(key))


def _data_changes(before: str | None, data: Mapping[str, object]) -> Iterator[Change]:
    old = {} if before is None else json.loads(before)
    for key in dict.fromkeys((*old, *data)):
        if before is not None and old.get(key) != data.get(key):
            yield f"data ({key})", old.get(key), data.get(key)


def _short(value: object) -> str:
    text = _MISSING if value is None else shown(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
