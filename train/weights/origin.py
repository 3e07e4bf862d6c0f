"""The files that a run keeps of the published model that it began from: config.json and those of the tokenizer, in the run directory.

An export needs them, and the folder of the model may be gone by then. They are copied when the run begins, and are small: the tensors stay
where they are. Beside them stands a list of their sizes and checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jgt.document import InputError

from ..checkpoint.contents import file_entries
from ..checkpoint.manifest import BrokenError, sealed
from ..checkpoint.steps import remove
from ..files.cache import local_file, local_folder
from ..files.disk import sync_tree
from ..files.json_text import read_object_file
from .foreign import inside
from .keys import words

ORIGIN = "origin"
"""The folder in a run directory."""
DESCRIPTION, _TOKENIZER = "config.json", "tokenizer.json"
_OTHERS = words(
    f"generation_config.json {_TOKENIZER} tokenizer_config.json special_tokens_map.json tokenizer.model vocab.json merges.txt "
    "added_tokens.json chat_template.jinja chat_template.json"
)
_SUMS = "origin.json"
_TEMPLATES = "additional_chat_templates"
_MOST_BYTES = 1 << 28


def keep_origin(run_folder: Path, hf: str | None, tokenizer: str | None, template: str | None = None) -> None:
    """Copies the small files of the model `hf`, and the tokenizer.json that a run reads, unless an earlier start has. Raises OSError.

    template: the file of a chat template that goes before that of the model.
    """
    target = run_folder / ORIGIN
    if os.path.lexists(target):
        return
    files = {**origin_files(None if hf is None else local_folder(hf, weights=False), tokenizer)}
    if template is not None:
        files = {name: file for name, file in files.items() if not name.startswith(("chat_template.", _TEMPLATES))}
        files[f"chat_template{'.json' if template.endswith('.json') else '.jinja'}"] = Path(template)
    if not files:
        return
    new = target.with_name(f"{ORIGIN}.new")
    remove(new)
    new.mkdir()
    for name, file in files.items():
        (new / name).parent.mkdir(exist_ok=True)
        (new / name).write_bytes(file.read_bytes())
    (new / _SUMS).write_text(json.dumps(_sums(new), indent=1) + "\n")
    sync_tree(new)
    new.rename(target)


def check_kept(folder: Path) -> None:
    """Raises InputError if a file of `keep_origin` is not as the run kept it. Runs of earlier versions have no list. Raises OSError."""
    try:
        kept, found = read_object_file(folder / _SUMS), _sums(folder)
    except FileNotFoundError:
        return
    except BrokenError as error:
        raise InputError([f"{folder}: {error}"]) from None
    if kept != found:
        listed = kept["files"] if kept is not None and kept == sealed(kept) else None
        names = [_SUMS] if listed is None else sorted(n for n in {*listed, *found["files"]} if listed.get(n) != found["files"].get(n))
        why = "differs from what the run kept when it began. Put the published model's file back there"
        raise InputError([f"{folder / name}: {why}" for name in names])


def _sums(folder: Path) -> dict[str, Any]:
    entries = [entry for entry in file_entries(folder, sha256=False) if entry.path != _SUMS]
    return sealed({"files": {entry.path: [entry.size, entry.crc32] for entry in entries}})


def origin_files(path: Path | None, tokenizer: str | None = None) -> Mapping[str, Path]:
    """The small files of a published model, by name.

    path: its folder, or its config.json. tokenizer: a tokenizer.json, whose folder goes before. Raises InputError or OSError.
    """
    files: dict[str, Path] = {}
    if path is not None and path.suffix == ".json":
        files[DESCRIPTION], path = path, None
    beside = None if tokenizer is None or not tokenizer.endswith(".json") else local_file(tokenizer)
    for folder, names in ((path, {DESCRIPTION, *_OTHERS}), (beside and beside.parent, _OTHERS)):
        if folder is not None:
            named = {str(file.relative_to(folder)) for file in folder.glob(f"{_TEMPLATES}/*.jinja")}
            files |= {name: inside(folder, name) for name in sorted(names | named) if os.path.lexists(folder / name)}
    if beside is not None:
        files[_TOKENIZER] = beside
    if large := [file for file in files.values() if file.stat().st_size > _MOST_BYTES]:
        raise InputError([f"{file}: is larger than {_MOST_BYTES:,} bytes, which no such file is" for file in large])
    return files
