"""The identity of a run: whether a start continues the run in its directory, or the one whose checkpoint it takes.

Starting a changed model or other data in an old run's directory would resume the old state and train on with it, and days later no one
could say what was trained. So the directory and each checkpoint store the config and a fingerprint of the data, and a start that differs in
a key of `FIXED` is refused, by name, unless `--allow-change` permits it.

The checks of the config need no JAX, and happen before anything is written. Those of the data follow when it is open.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError, Node, nearest, path_problem, shown

from ...checkpoint.steps import find_steps, open_steps
from ...config import Run
from ...files.bucket import bucket_problem, is_url, path_or_url
from ...files.disk import DiskError, describe
from ...settings.code.files import COPY, read_code
from ...settings.training import DPO
from .folder import CONFIG, DATA, fill_folder, place_problems

FIXED = ("model", "data", "run.seed", "lora", "optimizer.name", "optimizer.train", "code")
"""Keys that must not change between two starts of a run, and the user's own code. All else (mesh, rules, steps, batch, ...) may."""
_REFERENCE = "checkpoint.weights"
"""As `FIXED` with `train.loss: dpo`, which compares the model with the one that the run began as (`train.evaluate.reference`)."""
_PER_RUN = ("lora.dropout", "lora.hf")
"""Keys that may differ from those of the run whose adapters a run begins with."""
_BASE = "base"
"""As `FIXED`, the contents of the folder that has frozen parameters (`train.weights.contents`)."""
_MAX_BYTES = 1_000_000

Change = tuple[str, object, object]
"""A key, its value before, and its value now."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The checkpoint that a run resumes from: its newest one, or the newest one in `path` if the run has none.

    never: start from step 0 instead. allow: keys below `FIXED` that may differ from the run that is resumed.
    """

    never: bool = False
    path: Path | str | None = None
    allow: tuple[str, ...] = ()


def read_resume(resume: str, allow: Sequence[str], checkpoints: Path | str) -> Resume:
    """The flags `--resume` (auto, never, or a place) and `--allow-change` (keys) of a run with checkpoints there. Raises InputError."""
    problems, allowed = [], (*FIXED, _REFERENCE, _BASE)
    for key in allow:
        if not any(_is_below(key, section) for section in allowed):
            keys = f"It takes these keys and the keys below them: {', '.join(allowed)}"
            near = nearest(key, allowed, lists=False)
            why = f"unknown key. {near}" if near else "is not a key that needs to be allowed."
            problems.append(f"command line: --allow-change: {key}: {why} {keys}")
    path = None if resume in ("auto", "never") else path_or_url(str(resume))
    # A run with checkpoints resumes from them, and its origin may be gone.
    if isinstance(path, str) and (problem := bucket_problem(path)):
        problems.append(f"command line: --resume: {problem}")
    elif isinstance(path, Path) and path_problem(path, "folder") and not open_steps(checkpoints).listed():
        problems.append(f"command line: --resume: {resume}: is not a folder. Write auto, never, a run directory or one of its checkpoints")
    if problems:
        raise InputError(problems)
    return Resume(never=resume == "never", path=path, allow=tuple(allow))


def check_places(run: Run, resume: Resume, *, allow_command: bool = False) -> None:
    """Raises InputError with everything that is wrong with the run directory and the weights, or if a program may not be run."""
    problems: list[str] = []
    alerts, include = run.config.alerts, run.config.eval.include
    # Tasks have functions, and templates without a sandbox.
    programs = {
        "alerts.command": alerts is not None and alerts.command,
        "eval.include": include is not None and run.is_from_file("eval.include"),
    }
    for key in [key for key, is_named in programs.items() if is_named and not allow_command]:
        why = "names a program, and a run's file alone runs none. Add --allow-command (from Python: allow_command=True), or remove it"
        # What was typed may have a token, and this line may be stored.
        problems.append(f"{run.where(key) if run.is_from_file(key) else 'command line'}: {key}: {why}")
    for check in (lambda: _check_allowed(run, resume), lambda: check_folder(run, resume), lambda: check_weights(run)):
        with InputError.collect(problems):
            check()
    if problems:
        raise InputError(problems)


def _check_allowed(run: Run, resume: Resume) -> None:
    """Raises InputError for a key of `--allow-change` that neither the run's file nor the config.yaml of the run directory has."""
    keys, path = [key for key in resume.allow if key not in FIXED], run.config.run.path / CONFIG
    if not keys:
        return
    trees = [Node.of(run.resolved(), "config").plain(), *([document.read(path).plain()] if path.is_file() else [])]
    problems = list[str]()
    for section, _, name in (key.rpartition(".") for key in keys):
        beside = {key for tree in trees if isinstance(found := _get(tree, section), dict) for key in found}
        if section and name not in beside:
            problems.append(f"command line: --allow-change: {section}.{name}: unknown key. {nearest(name, beside)}")
    if problems:
        raise InputError(problems)


def check_folder(run: Run, resume: Resume) -> None:
    """Raises InputError if the run directory cannot be used, or was started with other values of the keys in `FIXED`; or DiskError."""
    folder = run.config.run.path
    path = folder / CONFIG
    if run.config.run.url is not None and resume.never and open_steps(run.config.run.checkpoints).listed():
        why = f"{run.config.run.url} has a run, and a bucket cannot move it away. Name another URL (run.dir=...)"
        raise InputError([f"command line: --resume: never: {why}"])
    try:
        fill_folder(run.config.run)
        problems = [f"{run.where('run.dir')}: run.dir: {problem}" for problem in place_problems(folder, moved=resume.never)]
    except OSError as error:
        raise DiskError(f"{describe(error, folder)}. No checkpoint was changed") from None
    if problems:
        raise InputError(problems)
    if resume.never or not _has_saved(run):
        return
    before = document.read(path).plain()
    code = run.code.checksum if _means_the_same(run, folder) else code_of(folder)
    problems = _changed(run, {**{key: _get(before, key) for key in _fixed(run)}, "code": code}, str(path), resume.allow)
    if problems:
        raise InputError(problems)


def _has_saved(run: Run) -> bool:
    """Whether there is a run with a checkpoint. A run directory without one has nothing to protect from another config."""
    return (run.config.run.path / CONFIG).is_file() and bool(open_steps(run.config.run.checkpoints).listed())


def _means_the_same(run: Run, folder: Path) -> bool:
    with contextlib.suppress(InputError, SyntaxError, ValueError):
        return run.code.meaning == read_code([folder / COPY]).meaning
    return False


def code_of(folder: Path) -> str | None:
    """The checksum of a run directory's copy of the user's own code; None if it has none that can be read."""
    if (folder / COPY).is_dir():
        with contextlib.suppress(InputError):
            return read_code([folder / COPY]).checksum
    return None


def check_weights(run: Run) -> None:
    """Raises InputError if there is no checkpoint at `checkpoint.weights`, also if this start is not going to use it; or OSError."""
    weights = run.config.checkpoint.weights
    if weights is None:
        return
    steps, named = find_steps(path_or_url(weights))
    if named is None and not steps.listed():
        why = f"no checkpoint in {weights}" if is_url(weights) or os.path.lexists(weights) else f"{weights} does not exist"
        remedy = "Name a run directory, or one of the steps in its checkpoints/"
        if (Path(weights) / "config.json").is_file():
            remedy = "A folder of Hugging Face belongs in model.hf"
        raise InputError([f"{run.where('checkpoint.weights')}: checkpoint.weights: {why}. {remedy}"])


def check_data(run: Run, fingerprint: Mapping[str, object], resume: Resume) -> None:
    """Raises InputError if the data's fingerprint differs from the one in the run directory."""
    path = run.config.run.path / DATA
    if resume.never or not _has_saved(run) or not path.is_file():
        return
    try:
        before = json.loads(document.read_bytes(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        before = error
    if not isinstance(before, dict):
        why = before if isinstance(before, Exception) else "it is not a JSON object"
        raise InputError([f"{path}: is damaged: {why}. Remove it if the data has not changed"])
    if problems := _changed_data(run, before, fingerprint, str(run.config.run.path), resume.allow):
        raise InputError(problems)


def check_origin(run: Run, before: Mapping[str, object], data: Mapping[str, object], where: str, allow: Sequence[str]) -> None:
    """Raises InputError if another run's checkpoint, whose fingerprints are `before`, was made with another model or other data."""
    config, old = (value if isinstance(value := before.get(key), dict) else {} for key in ("config", "data"))
    problems = [*_changed(run, config, where, allow), *_changed_data(run, old, data, where, allow)]
    if problems:
        raise InputError(problems)


def check_model(run: Run, before: Mapping[str, object], weights: Path | str) -> None:
    """Raises InputError with the keys in which the model differs from a checkpoint's, whose fingerprints are `before`."""
    old = _get(before, "config.model")
    different = [f"{key} is {shown(old)} there and {shown(new)} here" for key, old, new in _differences("model", old, _fixed(run)["model"])]
    if isinstance(old, dict) and different:
        remedy = "Write the same model section, or name other weights"
        raise InputError([f"{run.where('checkpoint.weights')}: checkpoint.weights: {weights}: {', '.join(different)}. {remedy}"])


def check_saved_model(run: Run, before: Mapping[str, object], where: str) -> None:
    """Raises InputError with the keys of a run directory's file in which the model differs from a checkpoint's: the file was damaged."""
    problems = [
        f"{run.where(key)}: {key}: is {_shown(key, new)}, but {where} was saved with {_shown(key, old)}. Restore the file, or set {key}"
        for key, old, new in _differences("model", _get(before, "config.model"), _fixed(run)["model"])
        if run.is_from_file(key)
    ]
    if problems:
        raise InputError(problems)


def check_adapters(run: Run, before: Mapping[str, object], weights: Path | str) -> None:
    """Raises InputError if the run would leave out or change the adapters of a checkpoint, whose fingerprints are `before`."""
    old = _get(before, "config.lora")
    differences = [] if old is None else _differences("lora", old, _fixed(run)["lora"])
    if different := [
        f"{key} is {_shown(key, was)} there and {_shown(key, now)} here" for key, was, now in differences if key not in _PER_RUN
    ]:
        remedy = "Write the same lora section, or begin with the model that jgt export --merge writes (model.hf)"
        raise InputError([f"{run.where('checkpoint.weights')}: checkpoint.weights: {weights}: {', '.join(different)}. {remedy}"])


def fingerprints(run: Run, data: Mapping[str, object]) -> dict[str, object]:
    """The values that a checkpoint records about its run."""
    return {"config": _fixed(run), "data": dict(data)}


def _fixed(run: Run) -> dict[str, object]:
    # As in a file, so that values compare equal to the ones there: a tuple is a list.
    resolved = Node.of(run.resolved(), "config").plain()
    keys = (*FIXED, _REFERENCE) if run.config.train.loss == DPO else FIXED
    return {**{key: _get(resolved, key) for key in keys}, "code": run.code.checksum or None}


def _changed(run: Run, before: Mapping[str, object], where: str, allow: Sequence[str]) -> list[str]:
    return [
        f"{run.where(key)}: {key}: is {_shown(key, new)}, but {where} was started with {_shown(key, old)}. "
        f"Change it back, give the run another name (run.name=...), or allow it (--allow-change {key})"
        for section, value in _fixed(run).items()
        for key, old, new in _differences(section, before.get(section), value)
        if not any(_is_below(key, allowed) for allowed in allow)
    ]


def _shown(key: str, value: Any) -> str:
    if key != "code":
        # As YAML has them.
        return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
    return "no code of your own" if value is None else f"other code ({value[:8]})"


def _changed_data(run: Run, before: Mapping[str, object], after: Mapping[str, object], where: str, allow: Sequence[str]) -> list[str]:
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    was, now = ({key: shown(value) for key, value in data.items()} for data in (before, after))
    # A checksum says nothing to a person.
    shown_keys = [key for key in keys if not key.endswith(("sha256", "crc32"))]
    changed = [f"{key} was {was.get(key, 'not there')}, is {now.get(key, 'not there')}" for key in shown_keys] or ["its contents differ"]
    if not keys or any(_is_below(key, "data") for key in allow):
        return []
    remedy = "Give the run another name (run.name=...), or allow it (--allow-change data)"
    return [f"{run.where('data')}: data: is not the data that {where} was started with: {'; '.join(changed)}. {remedy}"]


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _differences(key: str, old: object, new: object) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        # A key that is missing in the run's file was introduced after the run started. Its default is what the run was started with.
        for name in [name for name in old if name in new]:
            yield from _differences(f"{key}.{name}", old[name], new[name])
    elif old != new:
        yield key, old, new


def _get(tree: object, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
