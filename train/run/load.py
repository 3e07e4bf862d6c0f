"""The model of a run directory or of a folder of Hugging Face, for `jgt.load` and for commands that use a model.

Neither the training data nor an optimizer is needed. What differs between the two kinds of folders is where keys and arrays come from;
both are a config, whose `Setup` places the arrays.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jgt
from jgt import Rules
from jgt.document import InputError, nearest, read

from .. import config as configs
from ..checkpoint.saved import SavedStep, find_checkpoint
from ..checkpoint.signature import read_key
from ..checkpoint.steps import run_url, steps_near
from ..config import Run
from ..data.config import BYTES, DataConfig
from ..export.adapter import write_adapter
from ..export.form import run_form
from ..export.model import SavedModel
from ..files.bucket import Bucket, is_url, path_or_url
from ..files.cache import local_folder
from ..files.mirror import RECORDS, fetch_records
from ..generate.loaded import Loaded
from ..generate.rules import rules_of
from ..processes.compiled import finish_trial
from ..settings.code.files import COPY, Code
from ..settings.code.names import is_name
from ..setup import Setup, prepare
from ..setup.layout import mesh_layout
from ..setup.published import PublishedFiles, open_published, published_model
from ..step.trained import merged
from ..weights.adapters import common_section
from ..weights.origin import ORIGIN
from .api import listed, own_code, start_jax_here
from .directory.folder import CONFIG
from .directory.identity import check_saved_model
from .restored import restored_of_one, saved_params

_PUBLISHED = "hf:"
_ALONE = ("rules=null", "mesh={data: 1}", "pipeline=null", "sync=null")
"""The overrides of a model on one device."""


def load_model(
    path: str | Path,
    overrides: str | Sequence[str] = (),
    *,
    model: Callable[..., object] | None = None,
    loss: Callable[..., object] | None = None,
    data: object = None,
    transform: Callable[..., object] | None = None,
    code: str | Path | Sequence[str | Path] = (),
    sharded: bool = False,
    mesh: Any = None,
    rules: Rules | str | Path | Mapping[str, object] | None = None,
    generates: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
    **others: object,
) -> Loaded:
    """The model of a run directory's newest checkpoint, of one of its checkpoints, or of a folder of Hugging Face, with or without `hf:`.

    Each may be in a bucket and named by its URL. Of a folder of Hugging Face, a copy is read.

    overrides: changes of the run's config. model, loss, data, transform, code: the run's own parts, as in `run_here`. mesh, rules: the
    layout of the arrays: sizes by axis, and rules, which are the run's if only a mesh is given. sharded: whether mesh and rules are the
    run's. Without any of them, the arrays are whole on one device. generates: the layout is the one of generation, in which a model need
    not train.
    adapters: folders of PEFT by names, for a published model. Raises InputError, also without a checkpoint.
    """
    if others:
        remedy = f"A step is part of the path: {str(path).rstrip('/')}/checkpoints/STEP. Keys of the config are overrides"
        raise TypeError(f"jgt.load has no argument {next(iter(others))!r}. {remedy}")
    if mesh is not None and not isinstance(mesh, Mapping):
        raise TypeError(f"mesh must be the sizes of its axes, such as {{'fsdp': 8}}, not a {type(mesh).__name__}")
    own = own_code(code, {"model.kind": model, "train.loss": loss, "data.source": data, "data.transform": transform})
    changes = [] if sharded or mesh is not None or rules is not None else [*_ALONE]
    if mesh is not None:
        changes += ["pipeline=null", "sync=null", f"mesh={json.dumps(dict(mesh))}"]
    if rules is not None:
        changes += ["rules={default: replicate}"]
    folder, is_published = _folder(str(path))
    changes, peft, problems = [*changes, *listed(overrides)], {name: Path(path) for name, path in (adapters or {}).items()}, list[str]()
    if peft:
        if not is_published:
            remedy = "A run has its own adapter, and jgt export writes its model as such a folder"
            raise InputError([f"{path}: is not a folder of Hugging Face, so it takes no other adapters. {remedy}"])
        changes.append(f"lora={json.dumps(common_section(peft, folder, problems))}")
    run = configs.load({"model": {"hf": str(folder)}}, changes, reads_data=False) if is_published else _read_run(folder, changes, own)
    if rules is not None:
        run = _with_rules(run, rules)
    start_jax_here(run)
    # A process that reaches its end has no fault in the compiled programs that it has loaded.
    atexit.register(finish_trial)
    if generates:
        run = replace(run, rules=rules_of(run, mesh_layout(run).mesh.shape)[0])
    setup = prepare(run if sharded else _with_small_batch(run), partial_rules=True)
    return _published(setup, folder, peft, problems) if is_published else _trained(setup, path_or_url(path))


def load_writer(path: str, overrides: Sequence[str], code: Sequence[str], adapters: Mapping[str, Path] | None = None) -> Loaded:
    """The model of a command that lets it write: on the mesh of the overrides, or else on one device. Raises InputError.

    adapters: folders of PEFT, or runs that train an adapter, by names.
    """
    on_mesh = any(override.partition("=")[0].partition(".")[0] == "mesh" for override in overrides)
    with tempfile.TemporaryDirectory() as scratch:
        folders, problems = dict[str, Path](), list[str]()
        for number, (name, adapter) in enumerate((adapters or {}).items()):
            with InputError.collect(problems):
                folders[name] = _peft_folder(adapter, Path(scratch) / str(number))
        if problems:
            raise InputError(problems)
        return load_model(path, overrides, code=code, sharded=on_mesh, generates=True, adapters=folders).writer()


def _peft_folder(path: Path, scratch: Path) -> Path:
    """The folder of an adapter or, for a run that trains one, what `jgt export --adapter` writes. Raises InputError."""
    if not (path / CONFIG).is_file():
        return path
    folder, run = open_run_folder(path, Code())
    if run.config.lora is None:
        raise InputError([f"{path}: is a run that trains no adapter (it has no section lora). Name a run with one, or a folder of PEFT"])
    saved = _newest(path, run)
    model = SavedModel.of(saved, run.config.model, run.config.lora)
    write_adapter(run_form(run, folder, model.shapes), model, run.config.model, scratch, dtype="f32")
    return scratch


def _folder(name: str) -> tuple[Path, bool]:
    """The run directory around a path, or the folder of a published model, and whether it is one. Raises InputError."""
    if is_url(url := name.removeprefix(_PUBLISHED)):
        run = None if name.startswith(_PUBLISHED) else _files_of_run(run_url(url)[0])
        return (local_folder(url), True) if run is None else (run, False)
    path = Path(url)
    around = next((f for f in (path, *path.absolute().parents[:2]) if (f / CONFIG).is_file()), None)
    if name.startswith(_PUBLISHED) or (around is None and (path / "config.json").is_file()):
        return path, True
    if around is None:
        why = (
            "is not a run directory or a checkpoint in one, which has a config.yaml, and no folder of Hugging Face, which has a config.json"
        )
        raise InputError([f"{path}: {why}. {nearest(path.name, [one.parent.name for one in path.absolute().parent.glob(f'*/{CONFIG}')])}"])
    return around, False


def _files_of_run(url: str) -> Path | None:
    """A folder with the files that describe a run in a bucket, until the process ends; None if there is no run. Raises InputError."""
    bucket = Bucket(url)
    try:
        if not bucket.names(f"{RECORDS}/{CONFIG}"):
            return None
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        fetch_records(bucket, folder, lambda name: name.partition("/")[0] in (CONFIG, COPY, ORIGIN))
    except OSError as error:
        raise InputError([f"{error.filename or url}: cannot be read: {error.strerror or error}"]) from error
    return folder


def open_run_folder(path: Path | str, own: Code, overrides: Sequence[str] = ()) -> tuple[Path, Run]:
    """The run directory at a path, or around a checkpoint, and its run on one device. Raises InputError."""
    folder, is_published = _folder(str(path))
    if is_published:
        raise InputError([f"{path}: is a folder of Hugging Face already, not a run directory or a checkpoint in one"])
    return folder, _read_run(folder, [*_ALONE, *overrides], own)


def _read_run(folder: Path, changes: Sequence[str], own: Code) -> Run:
    root = read(folder / CONFIG)
    optimizer = root.find("optimizer").plain()
    # Another optimizer in the place of an own one trains the same parameters: the others have another type.
    is_own = isinstance(optimizer, dict) and is_name(optimizer.get("name"))
    first = [f"optimizer={json.dumps({'name': 'adamw', 'train': optimizer.get('train')})}"] if is_own else []
    if root.find("data.order").plain() == "zigzag" and not is_name(root.find("data.source").plain()):
        # Only a step of training reads rows in this order.
        first.append("data.order=plain")
    if isinstance(root.find("xla.cache").plain(), str):
        # Compiled programs are code, and the run may be a stranger's.
        first.append("xla.cache=auto")
    try:
        # Hooks and alerts are for training, and may be of code that is not at hand.
        return configs.load(folder / CONFIG, [*first, "hooks={}", "alerts=null", *changes], code=own, reads_data=False)
    except InputError as error:
        has_copy = own == Code() and (folder / COPY).is_dir()
        hint = [f"{folder / COPY}: has a copy of the run's code (code=..., --code)"] if has_copy else []
        raise InputError([*error.problems, *hint]) from None


def _with_rules(run: Run, rules: Rules | str | Path | Mapping[str, object]) -> Run:
    if not isinstance(rules, Rules):
        rules = jgt.make_rules(read(rules, Rules.FOLDER) if isinstance(rules, str | Path) else rules)
    if problems := list(rules.axis_problems(run.mesh)):
        raise InputError(problems)
    return replace(run, rules=rules)


def _with_small_batch(run: Run) -> Run:
    """The run with a batch that any mesh of the devices divides. A loss of the user's own may need the run's."""
    train = run.config.train
    if train.loss is not None:
        return run
    return replace(run, config=replace(run.config, train=replace(train, batch=len(jax.devices()), accumulate=1)))


def _published(setup: Setup, folder: Path, peft: Mapping[str, Path], problems: list[str]) -> Loaded:
    """problems: those of adapters so far."""
    config, opened = setup.run.config, dict[str, PublishedFiles]()
    assert isinstance(config.data, DataConfig)
    for name, path in peft.items():
        with InputError.collect(problems):
            opened[name] = open_published(setup, folder, path)
    if problems:
        raise InputError(problems)
    adapters = {name: files.factors(setup) for name, files in opened.items()}
    # One with the rank of the section, for which the layout of the state is made.
    first = max(adapters, key=lambda name: opened[name].rank, default=None)
    params, variables = published_model(setup, folder, None if first is None else adapters[first])
    # Statistics of the training of experts, which a published model lacks, begin as in a new run.
    fresh = jax.jit(lambda seed: setup.make_state(seed).variables, out_shardings=setup.shardings.variables)(np.uint32(0))
    # Without a tokenizer.json the config has its default.
    name = config.data.tokenizer
    name = None if name == BYTES else name
    params, variables = setup.model_params(params), merged(fresh, variables)
    return Loaded(setup=setup, params=params, variables=variables, step=0, tokenizer_name=name, adapters=adapters)


def _newest(path: Path | str, run: Run) -> SavedStep:
    """The checkpoint at a path, or the newest one of a run. Raises InputError."""
    saved, reports = find_checkpoint(path, read_key(run.config.checkpoint.key))
    if saved is None:
        raise InputError([*reports, f"{path}: has no whole checkpoint{steps_near(path)}"])
    check_saved_model(run, saved.manifest.fingerprints, str(saved.folder))
    return saved


def _trained(setup: Setup, path: Path | str) -> Loaded:
    data, saved = setup.run.config.data, _newest(path, setup.run)
    one, shardings = setup.saved_of_one
    variables = restored_of_one(saved, one, shardings, "variables") if jax.tree.leaves(one.variables) else {}
    # An average of the parameters is the model that was evaluated.
    if setup.shapes.average is None:
        params = setup.stored_params(saved_params(setup, saved, *setup.saved_params))
    else:
        frozen = saved_params(setup, saved, one.frozen, shardings.frozen) if one.frozen else {}
        average, frozen = setup.trained.split(setup.stored_params(merged(restored_of_one(saved, one, shardings, "average"), frozen)))
        params = merged(setup.averaged_params(average), frozen)
    return Loaded(
        setup=setup,
        params=setup.model_params(params),
        variables=variables,
        step=saved.manifest.step,
        tokenizer_name=data.tokenizer_name,
    )
